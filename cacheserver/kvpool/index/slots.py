# SPDX-License-Identifier: Apache-2.0
"""The slot table: one row a slot in plain arrays, moved in batches."""

import numpy as np
from numpy.typing import NDArray

from kvpool.index.phases import CONDEMNED, ILLEGAL, NEXT, IllegalMove, Op, Phase
from kvpool.model.slots import SlotArray

__all__ = ["SlotTable"]


class SlotTable:
    """Phase, pins and key of every slot. Rows of memory that was never used cost nothing: the arrays start as zeros.

    A batch must not name a slot twice. Every method changes all of its slots or, on IllegalMove, none.
    """

    def __init__(self, capacity: int) -> None:
        """Make a table of *capacity* free slots."""
        self.phase: NDArray[np.uint8] = np.zeros(capacity, dtype=np.uint8)
        self.pins: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        self.table: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        """Number of the key table that the chunk is in."""
        self.key: NDArray[np.object_] = np.empty(capacity, dtype=np.object_)
        """The chunk's digest: the very object that its key table has."""
        self.unverified: NDArray[np.bool_] = np.zeros(capacity, dtype=np.bool_)
        """True until the bytes of a slot taken over from a former server were verified once."""
        self.illegal_moves = 0

    def take(self, op: Op, slots: SlotArray, table: int, keys: list[bytes]) -> None:
        """Give free *slots* to new chunks: RESERVE, ADOPT or SEIZE."""
        self._move(op, slots)
        self.table[slots] = table
        self.key[slots] = keys
        self.unverified[slots] = op is Op.ADOPT

    def commit(self, slots: SlotArray) -> None:
        """Make written slots readable."""
        self._move(Op.COMMIT, slots)

    def abort(self, slots: SlotArray) -> None:
        """End the writers of *slots*; their bytes are dropped."""
        self._move(Op.ABORT, slots)

    def condemn(self, slots: SlotArray) -> None:
        """Make *slots* unreadable for ever; their holders stay."""
        self._move(Op.CONDEMN, slots)

    def pin(self, slots: SlotArray, count: int) -> int:
        """Add *count* pins to each of *slots*; returns how many of them had none."""
        self._move(Op.PIN, slots)
        before = self.pins[slots]
        self.pins[slots] = before + count
        return len(slots) - int(np.count_nonzero(before))

    def unpin(self, slots: SlotArray, counts: NDArray[np.int32] | int) -> NDArray[np.bool_]:
        """Take *counts* pins from each of *slots*; returns where none is left."""
        after = self.pins[slots] - counts
        if (after < 0).any():
            self._refuse(Op.UNPIN, slots[after < 0])
        self._move(Op.UNPIN, slots)
        self.pins[slots] = after
        none_left: NDArray[np.bool_] = after == 0
        return none_left

    def free(self, slots: SlotArray) -> None:
        """Return condemned slots that nobody holds."""
        pinned = self.pins[slots] != 0
        if pinned.any():
            self._refuse(Op.FREE, slots[pinned])
        self._move(Op.FREE, slots)

    def unheld(self, slots: SlotArray) -> SlotArray:
        """Return those of *slots* that are condemned and that nobody holds."""
        unheld: SlotArray = slots[(self.phase[slots] == CONDEMNED) & (self.pins[slots] == 0)]
        return unheld

    def _move(self, op: Op, slots: SlotArray) -> None:
        after = NEXT[op].take(self.phase[slots])
        if len(slots) and after.max() == ILLEGAL:
            self._refuse(op, slots[after == ILLEGAL])
        self.phase[slots] = after

    def _refuse(self, op: Op, slots: SlotArray) -> None:
        self.illegal_moves += 1
        slot = int(slots[0])
        raise IllegalMove(f"{op.name} on slot {slot} in {Phase(self.phase[slot]).name} with {self.pins[slot]} pins")
