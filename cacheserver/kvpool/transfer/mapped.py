# SPDX-License-Identifier: Apache-2.0
"""Mode mapped in the engine's process: the cache is exported to a mover, which then moves its blocks by itself.

What another process queued on the device cannot be drained from here. So whoever fails to get a mover's answer waits
until that mover does not exist any more, and only then lets go of the blocks: the server kills a mover whose client
says that it is retired, and movers die with their server.
"""

import itertools
import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.lanes import RingRetiredError
from kvpool.transfer.mover.messages import (
    Cancel,
    Direction,
    Done,
    Export,
    Exported,
    Job,
    Join,
    Piece,
    ToClient,
)
from kvpool.transfer.pipe import Pipe, PipeClosedError
from kvpool.transfer.ring import join_mover

__all__ = ["EngineCache", "MappedJob", "MappedMover"]


class EngineCache(Protocol):
    """The engine's cache, as it is shown to movers."""

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        """Export the memory that the cache lies in; descriptors (-1 for a piece with a handle) are the caller's.

        Raises:
            LayoutError: it cannot be exported.
        """

    def export(self) -> Export:
        """Describe what lies in the pieces."""

    def wait(self, event: int) -> None:
        """Block until an event of the engine's device happened; in a thread of ours."""


@dataclass(slots=True)
class MappedJob:
    """Chunks that a mover is to store or load; a ``RingMove`` of the client."""

    group: int
    grant: bytes
    ids: NDArray[np.int64]
    """Of all its chunks, as ``plan.slot_ids`` returns them."""

    chunks: Sequence[int]
    after: int = 0
    """An event of the engine's device before which nothing is moved; 0 for none."""

    read: Callable[[], None] | None = None
    """Not called: blocks are free at the end."""

    wrong: set[int] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stop: Callable[[], None] | None = None
    _cancelled: bool = False
    _void: bool = False

    def begin(self, stop: Callable[[], None]) -> bool:
        """Note that the mover is told of it now, and how to stop it; False if it may not be any more."""
        with self._changed:
            if not self._cancelled:
                self._stop = stop
            return not self._cancelled

    def end(self) -> bool:
        """Note that nothing of it runs; returns whether what was moved counts."""
        with self._changed:
            self._stop = None
            self._changed.notify_all()
            return not self._void

    def cancel(self, timeout_s: float) -> bool:
        """Begin nothing any more; returns whether nothing runs after at most *timeout_s*. Any thread.

        If something does, its blocks may change under it, so nothing of the job counts.
        """
        with self._changed:
            self._cancelled, stop = True, self._stop
        if stop is not None:
            stop()
        with self._changed:
            over = self._changed.wait_for(lambda: self._stop is None, max(0.0, timeout_s))
            self._void = not over
            return over


class MappedMover:
    """A mover that has mapped the engine's cache. Stores and loads run at the same time, one of each."""

    def __init__(
        self, cache: EngineCache, address: str, joins: Sequence[Join], ends_s: float, on_retired: Callable[[], None]
    ) -> None:
        """Join the mover at *address*, show it the cache and wait until it has mapped it.

        Args:
            cache: the engine's.
            address: ``unix:`` and a path.
            joins: for stores and for loads.
            ends_s: monotonic.
            on_retired: called once the mover is used no more, on any thread.

        Raises:
            RingRetiredError: it does not answer in time, or cannot map the cache.
            LayoutError: the cache cannot be exported.
        """
        self.retired = ""
        """Why it is not used any more; empty while it is."""
        self._lock = threading.Lock()
        self._on_retired = on_retired
        self._cache = cache
        self._numbers = itertools.count()
        self._pipes: dict[Direction, Pipe[ToClient]] = {}
        self._process = -1
        try:
            for join in joins:
                self._pipes[join.direction] = join_mover(address, join, ends_s)
            self._process = self._pipes[Direction.STORE].peer()
            self._show(ends_s)
        except (RingRetiredError, OSError) as e:
            self.close(str(e))
            raise RingRetiredError(str(e)) from e

    def store(self, job: MappedJob, ends_s: float) -> frozenset[int]:
        """Store a job's chunks; returns those that did not get there. Its blocks are free afterwards.

        Raises:
            RingRetiredError: time was up (*ends_s*, monotonic), or the mover failed; it does not exist any more.
        """
        return self._run(Direction.STORE, job, ends_s)

    def load(self, job: MappedJob, ends_s: float) -> frozenset[int]:
        """Load a job's chunks; returns those whose blocks were not written, or not all of them. As ``store``."""
        return self._run(Direction.LOAD, job, ends_s)

    def retire(self, reason: str) -> None:
        """Use the mover no more: jobs under way end once it does not exist any more. Any thread; idempotent."""
        with self._lock:
            first, self.retired = not self.retired, self.retired or reason
        for pipe in self._pipes.values():
            pipe.close()
        if first:
            self._on_retired()

    def close(self, reason: str = "closed") -> None:
        """Retire it and let go of it. Not while a job runs. Idempotent."""
        self.retire(reason)
        with self._lock:
            process, self._process = self._process, -1
        if process >= 0:
            os.close(process)

    def _run(self, direction: Direction, job: MappedJob, ends_s: float) -> frozenset[int]:
        if self.retired:
            raise RingRetiredError(self.retired)
        if job.after:
            self._cache.wait(job.after)
        pipe, number = self._pipes[direction], next(self._numbers)
        if not job.begin(lambda: self._stop(pipe, number)):
            return frozenset(job.chunks)
        try:
            done = self._answer(pipe, _message(number, job), ends_s)
        except (PipeClosedError, TimeoutError) as e:
            self.retire(f"{direction}: {e}")
            self._wait_gone()
            raise RingRetiredError(self.retired) from e
        finally:
            counts = job.end()
        job.wrong.update(done.wrong)
        return frozenset(done.failed if counts else job.chunks)

    @staticmethod
    def _answer(pipe: Pipe[ToClient], message: Job, ends_s: float) -> Done:
        pipe.send(message)
        while True:
            answer = pipe.receive(ends_s)
            if isinstance(answer, Done) and answer.job == message.job:
                return answer

    def _stop(self, pipe: Pipe[ToClient], number: int) -> None:
        try:
            pipe.send(Cancel(job=number))
        except PipeClosedError as e:
            self.retire(str(e))

    def _show(self, ends_s: float) -> None:
        if self._process < 0:
            raise RingRetiredError("this kernel gives no handle of the mover's process")
        pipe = self._pipes[Direction.STORE]
        for piece, descriptor in self._cache.pieces():
            try:
                pipe.send(piece, descriptor)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        pipe.send(self._cache.export())
        answer = pipe.receive(ends_s)
        if not isinstance(answer, Exported) or answer.error:
            raise RingRetiredError(f"the mover cannot map the cache: {getattr(answer, 'error', answer)}")

    def _wait_gone(self) -> None:
        """Wait for the mover's end: before that it may still read and write blocks."""
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        ended.poll()


def _message(number: int, job: MappedJob) -> Job:
    chunks = np.asarray(job.chunks, dtype=np.int64)
    ids = np.ascontiguousarray(job.ids[chunks], dtype="<i8").tobytes()
    return Job(job=number, group=job.group, grant=job.grant, chunks=tuple(chunks.tolist()), ids=ids)
