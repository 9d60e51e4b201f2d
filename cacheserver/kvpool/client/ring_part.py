# SPDX-License-Identifier: Apache-2.0
"""A job's part in the ring, prepared while the server still looks for its chunks."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from kvpool.client.jobs import LoadJob, StoreJob
from kvpool.client.ring_ports import JoinedRing, RingMove, RingWork
from kvpool.client.ringing import RingKeeper

__all__ = ["RingPart"]


class RingPart:
    """The move of one job. All calls are its lane's, but ``cancel``, which any thread may make.

    What was prepared for other chunks than the server then wants, or in a ring that is gone, was in vain.
    """

    def __init__(
        self,
        rings: RingKeeper | None,
        job: StoreJob | LoadJob,
        over: Callable[[], None],
        *,
        skip_blocks: int = 0,
        read: Callable[[], None] | None = None,
    ) -> None:
        """Make no move yet; *over*, *skip_blocks* and *read* are those of each ``RingWork`` for *job*."""
        self._rings, self._job = rings, job
        self._over, self._skip_blocks, self._read = over, skip_blocks, read
        self._lock = threading.Lock()
        self._prepared: tuple[JoinedRing, RingMove] | None = None
        self._made: list[RingMove] = []
        self._tried, self._cancelled = rings is None, False
        self.move: RingMove | None = None
        """What was taken."""

    def is_new(self) -> bool:
        """True until it was prepared or taken; never without rings."""
        return not self._tried

    def prepare(self, chunks: Sequence[int], *, gather: bool) -> None:
        """Check the ids, and begin to gather: the server will most likely want all of *chunks*.

        Ids that are wrong are nobody's yet: ``take`` raises for them.
        """
        with self._lock:
            if (ring := self._current()) is None:
                return
            with suppress(IndexError, ValueError):
                self._prepared = ring, self._make(ring, chunks)
            if gather and self._prepared is not None:
                ring.gather(self._prepared[1])

    def take(self, chunks: Sequence[int]) -> tuple[JoinedRing, RingMove] | None:
        """Return the ring and a move for what the server wants; None if it is cancelled or there is no ring.

        Raises:
            IndexError, ValueError: as ``JoinedRing.move``.
        """
        with self._lock:
            ring, prepared = self._current(), self._prepared
            if ring is None:
                return None
            if prepared is not None and prepared[0] is ring and [*prepared[1].chunks] == [*chunks]:
                self._prepared, self.move = None, prepared[1]
            else:
                self._forget()
                self.move = self._make(ring, chunks)
            return ring, self.move

    def cancel(self, timeout_s: float) -> bool:
        """Begin no kernel any more; returns whether none runs after at most *timeout_s*."""
        ends_s, self._cancelled = monotonic() + timeout_s, True
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            return False
        self._lock.release()
        idle = [move.cancel(ends_s - monotonic()) for move in self._made]
        return all(idle)

    def drop(self, timeout_s: float) -> None:
        """Give up what was prepared and not taken, and wait at most *timeout_s* until no kernel of it reads blocks."""
        self.cancel(timeout_s)
        with self._lock:
            self._forget()

    def _current(self) -> JoinedRing | None:
        self._tried = True
        return self._rings.current() if self._rings is not None and not self._cancelled else None

    def _make(self, ring: JoinedRing, chunks: Sequence[int]) -> RingMove:
        job = self._job
        work = RingWork(
            group=job.group,
            block_ids=job.block_ids,
            chunks=chunks,
            skip_blocks=self._skip_blocks,
            after=job.after.event if job.after is not None else 0,
            over=self._over,
            read=self._read,
        )
        move = ring.move(work)
        self._made.append(move)
        return move

    def _forget(self) -> None:
        if self._prepared is not None:
            ring, move = self._prepared
            self._prepared = None
            ring.forget(move)
