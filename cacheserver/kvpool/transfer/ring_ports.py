# SPDX-License-Identifier: Apache-2.0
"""A job of the ring, and what the ring needs from the engine's device."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from kvpool.transfer.jobs import EngineJob
from kvpool.transfer.mover.messages import Direction, Ring
from kvpool.transfer.plan import Turn

__all__ = ["EngineDevice", "RingJob"]


@dataclass(slots=True, eq=False)
class RingJob(EngineJob):
    """A job that goes through the ring. A lane counts its turns, on the lane's two threads."""

    is_over: bool = True
    """True once it has ended."""

    gathered: list[tuple[int, Turn]] = field(default_factory=list)
    """Stores: slots and turns that wait for the grant. The caller's thread, or whoever empties it."""

    unanswered: int = 0
    """Loads: turns that the mover has to answer, also those that it was not asked for yet. The caller's thread."""

    _failed: set[int] = field(default_factory=set)
    _left: int = 0
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _launched: int = 0
    _cancelled: bool = False

    def start(self, ends_s: float, finish: Callable[[], None]) -> None:
        """Begin; one turn is expected: that all of them are known."""
        self.ends_s, self.finish, self.lost = ends_s, finish, None
        self._failed, self._left, self.unanswered, self.is_over = set(), 1, 0, False

    def expect(self, turns: int) -> None:
        """Count turns that are to come."""
        with self._counting:
            self._left += turns

    def ended(self, lost: Collection[int] = ()) -> None:
        """Count the end of a turn, of which *lost* did not get there; the last one ends the job."""
        with self._counting:
            if lost:
                self._failed.update(lost)
            self._left -= 1
            if self._left or self.is_over:
                return
            self.lost = frozenset(self._failed)
        self._tell()

    def stop(self) -> None:
        """End it: the ring is retired, and no kernel runs or will."""
        self._cancelled = True
        if not self.is_over:
            self._tell()

    def wait_over(self) -> None:
        """Wait until it has ended.

        Raises:
            TimeoutError: it has not, in its time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_over, max(0.0, self.ends_s - monotonic())):
                raise TimeoutError("a kernel did not end in time")

    def _tell(self) -> None:
        with self._changed:
            first, self.is_over = not self.is_over, True
            self._changed.notify_all()
        if first and self.over is not None:
            self.over()

    def begin(self) -> bool:
        """Count a kernel that uses the engine's blocks; False if none may any more."""
        with self._changed:
            if self._cancelled:
                return False
            self._launched += 1
            return True

    def end(self) -> None:
        """Count a kernel's end."""
        with self._changed:
            self._launched -= 1
            self._changed.notify_all()

    def cancel(self, timeout_s: float) -> bool:
        """Begin no kernel any more; returns whether none runs after at most *timeout_s*. Any thread."""
        with self._changed:
            self._cancelled = True
            return self._changed.wait_for(lambda: not self._launched, max(0.0, timeout_s))


class EngineDevice(Protocol):
    """The engine's blocks and the ring. Each direction is used by its lane's two threads, which call ``use`` first.

    Raises CudaError.
    """

    ring: Ring

    def fit(self, blocks_per_chunk: Sequence[int]) -> None:
        """Learn how many blocks a chunk of each group has; while no job runs."""

    def use(self) -> None:
        """Prepare the calling thread."""

    def turns(self, group: int, chunks: Sequence[int]) -> Iterator[Turn]:
        """Spread chunks of a group over slots."""

    def follow(self, direction: Direction, event: int) -> None:
        """Let the kernels of this direction that are launched from now on begin after an event of the engine."""

    def launch(self, direction: Direction, slot: int, job: RingJob, turn: Turn) -> None:
        """Put the kernel of one turn into the direction's stream; it does not wait for it."""

    def wait(self, direction: Direction, slot: int) -> None:
        """Block until the kernel that was last launched for the slot is done."""

    def drain(self, direction: Direction) -> None:
        """Block until all kernels of the direction are done."""
