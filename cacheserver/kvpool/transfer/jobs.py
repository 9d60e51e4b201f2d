# SPDX-License-Identifier: Apache-2.0
"""What an engine wants moved, whichever way a mover does it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["EngineJob"]


@dataclass(slots=True, eq=False)
class EngineJob:
    """Chunks to be stored or loaded; a ``RingMove`` of the client."""

    group: int
    ids: NDArray[np.int64]
    """Of all its chunks, as ``plan.slot_ids`` returns them."""

    chunks: Sequence[int]
    """Those that are to be moved."""

    grant: bytes = b""
    """What the server calls it when it tells the mover; empty until that is known."""

    after: int = 0
    """An event of the engine's device before which no block is touched; 0 for none."""

    read: Callable[[], None] | None = None
    """Stores: called once all blocks are gathered, on any thread, if that is known before the job's end."""

    over: Callable[[], None] | None = None
    """Called once it has ended, on any thread."""

    wrong: set[int] = field(default_factory=set)
    """Loads: chunks that are not what was stored, as the mover found."""

    lost: frozenset[int] | None = None
    """Once it has ended: chunks that did not get there, or not all of them; None if the ring was retired or the mover
    failed before."""

    ends_s: float = 0.0
    """When the mover must have answered all of it, on the monotonic clock."""

    finish: Callable[[], None] = lambda: None
    """Waits for its end; by the thread that began it."""
