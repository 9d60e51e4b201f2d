# SPDX-License-Identifier: Apache-2.0
"""The ring in the engine's process: device memory that a mover fills and empties, and its two lanes."""

import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

from kvpool.transfer.lanes import LoadLane, RingRetiredError, StoreLane
from kvpool.transfer.mover.messages import Direction, Join, Joined, ToClient
from kvpool.transfer.pipe import Pipe, PipeClosedError
from kvpool.transfer.ring_ports import EngineDevice, RingJob

__all__ = ["EngineRing", "RingJob", "RingRetiredError", "join_mover", "slots_that_fit"]

_LEAST_SLOTS: Final = 2
"""With one slot a kernel and a copy never overlap."""


def slots_that_fit(free_bytes: int, keep_bytes: int, slots: int, slot_bytes: int) -> int:
    """Return how many slots a lane can have when *keep_bytes* stay free: at most *slots*; 0 if too few to be a ring."""
    fit = min(slots, max(0, free_bytes - keep_bytes) // (2 * slot_bytes))
    return fit if fit >= _LEAST_SLOTS else 0


class EngineRing:
    """A ring joined to its mover. Stores and loads run at the same time, each on one thread.

    Once retired it stays so: a copy that was queued in the mover may still touch the slots. The owner frees the memory
    only when the server says that the mover was reaped.
    """

    def __init__(
        self,
        device: EngineDevice,
        address: str,
        secret: bytes,
        ends_s: float,
        on_retired: Callable[[], None] = lambda: None,
    ) -> None:
        """Join the mover at *address*; *on_retired* is called once the ring is retired, on any thread.

        Raises:
            RingRetiredError: it does not answer until *ends_s* (monotonic), or refuses.
        """
        self.retired = ""
        """Why the ring is not used any more; empty while it is."""
        self._lock = threading.Lock()
        self._on_retired = on_retired
        self._pipes: list[Pipe[ToClient]] = []
        try:
            for direction in Direction:
                join = Join(secret=secret, direction=direction, generation=device.ring.generation)
                self._pipes.append(join_mover(address, join, ends_s))
        except RingRetiredError as e:
            self.retire(str(e))
            raise
        self._stores = StoreLane(device, self._pipes[0], self.retire)
        self._loads = LoadLane(device, self._pipes[1], self.retire)

    def gather(self, job: RingJob) -> None:
        """See ``StoreLane.gather``."""
        if not self.retired:
            self._stores.gather(job)

    def forget(self, job: RingJob) -> None:
        """See ``StoreLane.forget``."""
        self._stores.forget(job)

    def begin(self, direction: Direction, job: RingJob, ends_s: float) -> None:
        """See ``StoreLane.begin`` and ``LoadLane.begin``; ends the job if the ring is retired."""
        if self.retired:
            job.start(ends_s, lambda: None)
            job.stop()
        else:
            (self._stores if direction is Direction.STORE else self._loads).begin(job, ends_s)

    def retire(self, reason: str) -> None:
        """Use the ring no more: jobs under way end with RingRetiredError. Any thread; the first reason stays."""
        with self._lock:
            first, self.retired = not self.retired, self.retired or reason
        for pipe in self._pipes:
            pipe.close()
        if first:
            self._on_retired()

    def close(self) -> None:
        """Retire the ring and end its threads; no kernel of it runs afterwards. Not while a job runs. Idempotent."""
        self.retire("closed")
        self._stores.close()
        self._loads.close()


def join_mover(address: str, join: Join, ends_s: float) -> Pipe[ToClient]:
    """Return a connection that the mover at *address* has accepted.

    Raises:
        RingRetiredError: it does not answer until *ends_s* (monotonic), or refuses.
    """
    try:
        connection = _connect(address, max(0.001, ends_s - monotonic()))
    except (OSError, ValueError) as e:  # the latter: what cannot be a name or a port
        raise RingRetiredError(f"the mover cannot be joined: {e}") from e
    pipe: Pipe[ToClient] = Pipe(connection, ToClient)
    try:
        pipe.send(join)
        if not isinstance(pipe.receive(ends_s), Joined):
            raise PipeClosedError("it did not say Joined")
    except OSError as e:
        pipe.close()
        raise RingRetiredError(f"the mover cannot be joined: {e}") from e
    return pipe


def _connect(address: str, timeout_s: float) -> socket.socket:
    kind, _, where = address.partition(":")
    if kind != "unix":
        host, _, port = where.rpartition(":")
        # An address of the newer family stands in brackets.
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(where)
    except OSError:
        connection.close()
        raise
    return connection
