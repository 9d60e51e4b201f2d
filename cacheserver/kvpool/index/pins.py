# SPDX-License-Identifier: Apache-2.0
"""How much one client pins: shared prefixes count once."""

import numpy as np
from numpy.typing import NDArray

from kvpool.model.slots import SlotArray

__all__ = ["PinLedger"]


class PinLedger:
    """One client's pins by slot. It takes memory with the first pin, and then for rows that were touched alone."""

    def __init__(self, capacity: int) -> None:
        """Start with no pins on *capacity* slots."""
        self.bytes = 0
        self._capacity = capacity
        self._pins: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def pinned(self, slots: SlotArray) -> NDArray[np.bool_]:
        """Return which slots this client pins already."""
        if not len(self._pins):
            return np.zeros(len(slots), dtype=np.bool_)
        pinned: NDArray[np.bool_] = self._pins[slots] > 0
        return pinned

    def pin(self, slots: SlotArray, count: int, slot_bytes: int) -> None:
        """Note *count* more pins on each of some slots of one size."""
        if not len(self._pins):
            self._pins = np.zeros(self._capacity, dtype=np.int32)
        before = self._pins[slots]
        self._pins[slots] = before + count
        self.bytes += (len(slots) - int(np.count_nonzero(before))) * slot_bytes

    def unpin(self, slots: SlotArray, counts: NDArray[np.int32] | int, slot_bytes: int) -> None:
        """Note that pins went."""
        after = self._pins[slots] - counts
        assert (after >= 0).all(), "a lease returns no more pins than it took"
        self._pins[slots] = after
        self.bytes -= (len(slots) - int(np.count_nonzero(after))) * slot_bytes
