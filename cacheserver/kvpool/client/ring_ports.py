# SPDX-License-Identifier: Apache-2.0
"""What the client needs from whoever owns a ring in device memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.model.identity import Mode
from kvpool.wire.messages import Register

__all__ = ["JoinedRing", "RingMove", "RingPort", "RingWork"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWork:
    """Chunks of one store or load that go through the ring."""

    group: int
    block_ids: NDArray[np.int64]
    """Of all the job's chunks, shape (chunks, blocks per chunk); NOWHERE where there is no block."""

    chunks: Sequence[int]
    """Those that are to be moved."""

    over: Callable[[], None]
    """Called once, on any thread, when all of it has ended. Raises nothing."""

    skip_blocks: int = 0
    """Blocks at the job's start that are left alone."""

    after: int = 0
    """An event of the engine's device that the first kernel waits for; 0 for none."""

    read: Callable[[], None] | None = None
    """Stores: called, on any thread, once the blocks are not read any more, if that is before the end."""


class RingMove(Protocol):
    """A RingWork, prepared or under way."""

    chunks: Sequence[int]
    """Those that are to be moved."""

    lost: frozenset[int] | None
    """Once it has ended, and no kernel of it runs any more: the chunks that did not get there. None if the ring was
    retired before: nothing may be taken for moved."""

    wrong: set[int]
    """Loads: chunks that are not what was stored, as the mover found; they are among those that are lost."""

    def cancel(self, timeout_s: float) -> bool:
        """Begin no kernel any more; returns whether none runs after at most *timeout_s*. Any thread."""

    @property
    def finish(self) -> Callable[[], None]:
        """Waits for its end; by the thread that began it. Also the moves that were begun after it go on meanwhile."""


class JoinedRing(Protocol):
    """A ring and its mover. Stores are begun and finished by one thread, loads by another."""

    @property
    def retired(self) -> str:
        """Why it is not used any more; empty while it is."""

    def move(self, work: RingWork) -> RingMove:
        """Check the ids and prepare.

        Raises:
            IndexError, ValueError: an id is out of range, or occurs twice; nothing has been moved.
        """

    def gather(self, move: RingMove) -> None:
        """Begin a store as far as that goes without a grant; ``store`` goes on with it, or ``forget`` gives it up."""

    def forget(self, move: RingMove) -> None:
        """Give up what was only gathered; nothing to do for any other move. Any thread."""

    def store(self, move: RingMove, grant: bytes, ends_s: float) -> None:
        """Move the chunks to their slots until *ends_s* (monotonic); returns once the last of them is on its way.

        Then another move may be begun, or this one finished: one of both is to be done, or nobody hears the mover.
        *grant* is what the server called it when it told the mover.
        """

    def load(self, move: RingMove, grant: bytes, ends_s: float) -> None:
        """Move the chunks to their blocks; as ``store``."""

    def retire(self, reason: str) -> None:
        """Use it no more: moves under way end. Any thread."""

    def close(self) -> None:
        """Retire it, wait until its moves have ended, and end its threads."""


class RingPort(Protocol):
    """A ring of the engine's, or in mode mapped its cache."""

    mode: Mode
    """RING or MAPPED."""

    def offer(self, base: Register) -> Register:
        """Return a registration that describes it under a new generation: whatever was joined before is closed."""

    def join(self, address: str, secret: bytes, ends_s: float, retired: Callable[[], None]) -> JoinedRing:
        """Connect with its mover; *retired* is called once, on any thread, when it is retired.

        Raises:
            ServerUnavailable: the mover cannot be joined until *ends_s* (monotonic).
        """
