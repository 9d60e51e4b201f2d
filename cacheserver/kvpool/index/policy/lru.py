# SPDX-License-Identifier: Apache-2.0
"""Least recently used, and the leaf first among chunks of equal recency."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.model.slots import SlotArray

__all__ = ["Lru"]

_ORDINAL_BITS: Final = 20
_LAST_ORDINAL: Final = (1 << _ORDINAL_BITS) - 1


class Lru:
    """One stamp a slot: the turn of its last use above, the distance from the end of the longest chain below."""

    def __init__(self, capacity: int) -> None:
        """Make a policy over *capacity* slots."""
        self._stamp: NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        self._turn = 0

    def stored(self, slots: SlotArray, ordinals: NDArray[np.uint32], parent: int) -> None:
        """Give new chunks the recency of their parent: without it they could not be reached."""
        self._turn += 1
        turn = int(self._stamp[parent]) >> _ORDINAL_BITS if parent >= 0 else self._turn
        self._put(slots, ordinals, turn)

    def used(self, slots: SlotArray, ordinals: NDArray[np.uint32]) -> None:
        """Make *slots* the most recent ones."""
        self._turn += 1
        self._put(slots, ordinals, self._turn)

    def rank(self, slots: SlotArray) -> NDArray[np.int64]:
        """Return the stamps."""
        stamps: NDArray[np.int64] = self._stamp[slots]
        return stamps

    def _put(self, slots: SlotArray, ordinals: NDArray[np.uint32], turn: int) -> None:
        height = _LAST_ORDINAL - np.minimum(ordinals, _LAST_ORDINAL).astype(np.int64)
        self._stamp[slots] = (turn << _ORDINAL_BITS) | height
