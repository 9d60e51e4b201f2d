# SPDX-License-Identifier: Apache-2.0
"""What an eviction policy is: it ranks, the index disposes."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.model.slots import SlotArray

__all__ = ["Policy"]


class Policy(Protocol):
    """Keeps what it needs about each slot and says which of some slots are worth least.

    Owed: a chunk never ranks above its parent, so that no chunk outlives what it hangs on.
    """

    def stored(self, slots: SlotArray, ordinals: NDArray[np.uint32], parent: int) -> None:
        """Learn that *slots* were given to a run of new chunks; *parent* is the slot before the run, or -1."""

    def used(self, slots: SlotArray, ordinals: NDArray[np.uint32]) -> None:
        """Learn that one request uses *slots*, parts of one prefix."""

    def rank(self, slots: SlotArray) -> NDArray[np.int64]:
        """Return the rank of each slot: the lowest is evicted first. Ranks of unused slots never fall."""
