# SPDX-License-Identifier: Apache-2.0
"""The engine's ring as the client uses it: one piece of device memory, one mover after the other."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from kvpool.client.ring_ports import RingMove, RingWork
from kvpool.model.errors import ServerUnavailable
from kvpool.model.identity import Mode
from kvpool.model.layout import NOWHERE
from kvpool.transfer.mapped import MappedJob
from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.plan import slot_ids
from kvpool.transfer.planes import Layout
from kvpool.transfer.ring import EngineRing, RingRetiredError
from kvpool.transfer.ring_ports import EngineDevice, RingJob
from kvpool.wire.messages import Register, RingFacts

__all__ = ["JoinedEngineRing", "RingOffer"]

_IDLE_S: Final = 30.0
"""Moves of a retired ring end when the kernels that were launched do."""


class _Ended(Protocol):
    """The engine's end of a ring, or of an exported cache."""

    @property
    def retired(self) -> str: ...

    def gather(self, job: Any) -> None: ...

    def forget(self, job: Any) -> None: ...

    def begin(self, direction: Direction, job: Any, ends_s: float) -> None: ...

    def retire(self, reason: str) -> None: ...

    def close(self) -> None: ...


class RingOffer:
    """A ``RingPort`` of the client over an engine's device."""

    mode = Mode.RING

    def __init__(self, device: EngineDevice, layouts: Sequence[Layout]) -> None:
        """Offer the ring of *device*; *layouts* are those of its groups."""
        self.device, self._layouts = device, layouts
        self._fitted: tuple[int, ...] = ()
        self._joined: JoinedEngineRing | None = None

    def fit(self, blocks_per_chunk: Sequence[int]) -> None:
        """Learn how many blocks a chunk of each group has; waits for the moves of a former session.

        Raises:
            LayoutError: chunks cannot go through the ring.
        """
        if tuple(blocks_per_chunk) != self._fitted:
            if self._joined is not None:
                self._joined.close()
            self.device.fit(blocks_per_chunk)
            self._fitted = tuple(blocks_per_chunk)

    def offer(self, base: Register) -> Register:
        """See RingPort."""
        ring = self.device.ring
        self.device.ring = ring = msgspec.structs.replace(ring, generation=ring.generation + 1)
        facts = RingFacts(
            device=ring.device,
            handle=ring.handle,
            slots=ring.slots,
            slot_bytes=ring.slot_bytes,
            generation=ring.generation,
        )
        return msgspec.structs.replace(base, ring=facts)

    def join(self, address: str, secret: bytes, ends_s: float, retired: Callable[[], None]) -> "JoinedEngineRing":
        """See RingPort."""
        try:
            ring = EngineRing(self.device, address, secret, ends_s, retired)
        except RingRetiredError as e:
            raise ServerUnavailable(str(e)) from e
        self._joined = JoinedEngineRing(ring, self._layouts)
        return self._joined


class JoinedEngineRing:
    """See JoinedRing of the client."""

    def __init__(
        self, ring: _Ended, layouts: Sequence[Layout], make: Callable[..., RingJob | MappedJob] = RingJob
    ) -> None:
        """Use *ring*, whose jobs *make* returns."""
        self._ring, self._layouts, self._make = ring, layouts, make
        self._idle = threading.Condition()
        self._running = 0

    @property
    def retired(self) -> str:
        """See JoinedRing."""
        return self._ring.retired

    def move(self, work: RingWork) -> RingJob | MappedJob:
        """See JoinedRing."""
        chunks, whole = work.block_ids.shape
        wanted, skip = work.block_ids, None
        if work.skip_blocks:
            skip = np.clip(work.skip_blocks - np.arange(chunks) * whole, 0, whole)
        if len(work.chunks) < chunks:
            wanted = np.full(work.block_ids.shape, NOWHERE, dtype=np.int64)
            numbers = np.asarray(work.chunks, dtype=np.int64)
            wanted[numbers] = work.block_ids[numbers]
        ids = slot_ids(wanted, self._layouts[work.group].blocks, null_block=NOWHERE, skip=skip)
        job = self._make(group=work.group, ids=ids, chunks=work.chunks, after=work.after, read=work.read)
        job.over = partial(self._over, work.over)
        return job

    def gather(self, move: RingMove) -> None:
        """See JoinedRing."""
        self._count()
        try:
            self._ring.gather(move)
        finally:
            self._uncount()

    def forget(self, move: RingMove) -> None:
        """See JoinedRing."""
        self._ring.forget(move)

    def store(self, move: RingMove, grant: bytes, ends_s: float) -> None:
        """See JoinedRing."""
        self._begin(Direction.STORE, move, grant, ends_s)

    def load(self, move: RingMove, grant: bytes, ends_s: float) -> None:
        """See JoinedRing."""
        self._begin(Direction.LOAD, move, grant, ends_s)

    def retire(self, reason: str) -> None:
        """See JoinedRing."""
        self._ring.retire(reason)

    def close(self) -> None:
        """See JoinedRing."""
        self._ring.retire("closed")
        with self._idle:
            idle = self._idle.wait_for(lambda: not self._running, _IDLE_S)
        if idle:
            self._ring.close()

    def _begin(self, direction: Direction, move: RingMove, grant: bytes, ends_s: float) -> None:
        assert isinstance(move, RingJob | MappedJob)
        move.grant = grant
        self._count()
        self._ring.begin(direction, move, ends_s)

    def _over(self, then: Callable[[], None]) -> None:
        try:
            then()
        finally:
            self._uncount()

    def _count(self) -> None:
        with self._idle:
            self._running += 1

    def _uncount(self) -> None:
        with self._idle:
            self._running -= 1
            self._idle.notify_all()
