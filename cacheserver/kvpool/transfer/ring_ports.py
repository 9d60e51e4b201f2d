# SPDX-License-Identifier: Apache-2.0
"""A job of the ring, and what the ring needs from the engine's device."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.mover.messages import Direction, Ring
from kvpool.transfer.plan import Turn

__all__ = ["EngineDevice", "RingJob"]


@dataclass(slots=True)
class RingJob:
    """Chunks to be stored or loaded through the ring."""

    group: int
    grant: bytes
    """What the server calls it when it tells the mover."""

    ids: NDArray[np.int64]
    """Of all its chunks, as ``plan.slot_ids`` returns them."""

    chunks: Sequence[int]
    """Those that are to be moved."""

    after: int = 0
    """An event of the engine's stream that the first kernel waits for; 0 for none."""

    read: Callable[[], None] | None = None
    """Stores: called once all blocks are gathered, on any thread; not if the ring is retired before."""

    wrong: set[int] = field(default_factory=set)
    """Loads: chunks that are not what was stored, as the mover found."""

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _launched: int = 0
    _cancelled: bool = False

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
