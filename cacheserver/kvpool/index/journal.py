# SPDX-License-Identifier: Apache-2.0
"""What became readable and what is gone, of the tables that somebody watches: a bounded log with sequence numbers."""

from collections import deque
from itertools import islice
from typing import Final, NamedTuple

from kvpool.index.slots import SlotTable
from kvpool.model.slots import SlotArray

__all__ = ["Entry", "Journal"]

KEPT: Final = 1 << 16


class Entry(NamedTuple):
    """One chunk that came or went."""

    table: int
    digest: bytes
    stored: bool


class Journal:
    """See the module. All calls come from the index's thread. Nothing is kept while nobody watches."""

    def __init__(self, kept: int = KEPT) -> None:
        """Keep the last *kept* entries."""
        self.watched: set[int] = set()
        """Numbers of tables."""

        self.sequence = 0
        """Of the last entry."""

        self._entries: deque[Entry] = deque(maxlen=kept)

    def watch(self, tables: set[int]) -> None:
        """Note from now on what happens in *tables*, and in no others."""
        self.watched = tables
        if not tables:
            self._entries.clear()

    def note(self, rows: SlotTable, slots: SlotArray, *, stored: bool) -> None:
        """The chunks in *slots* came or went."""
        if not self.watched or not len(slots):
            return
        numbers = rows.table[slots]
        for number in self.watched.intersection(numbers.tolist()):
            digests = rows.key[slots[numbers == number]].tolist()
            self._entries.extend(Entry(number, digest, stored) for digest in digests)
            self.sequence += len(digests)

    def since(self, sequence: int) -> list[Entry] | None:
        """Return all entries after *sequence*; None if some of them are not kept any more, or never were."""
        behind = self.sequence - sequence
        if not 0 <= behind <= len(self._entries):
            return None
        return [*islice(self._entries, len(self._entries) - behind, None)]
