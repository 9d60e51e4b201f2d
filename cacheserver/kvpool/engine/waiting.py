# SPDX-License-Identifier: Apache-2.0
"""Who waits for which slot: lookups whose next chunks another writer or a tier still brings."""

from typing import NamedTuple

from kvpool.model.slots import SlotArray

__all__ = ["Arrivals", "Waiting"]

_Place = tuple[bytes, tuple[int, int]]


class Arrivals(NamedTuple):
    """What became of slots that lookups wait for, by lookup id and (group, shard): rows and their slots."""

    ready: dict[_Place, list[tuple[int, int]]]
    failed: dict[_Place, list[tuple[int, int]]]


class Waiting:
    """Waiters by slot. An entry may outlive its lookup: whoever is told checks whether it still wants to know."""

    def __init__(self) -> None:
        """Start with none."""
        self._waiters: dict[int, list[tuple[_Place, int]]] = {}
        self._ready: dict[_Place, list[tuple[int, int]]] = {}
        self._failed: dict[_Place, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, slot: int, lookup_id: bytes, table: tuple[int, int], row: int) -> None:
        """Note that chunk *row* of a lookup waits for *slot*."""
        self._waiters.setdefault(slot, []).append(((lookup_id, table), row))

    def ready(self, slots: SlotArray) -> None:
        """Learn that slots became readable."""
        self._collect(slots, self._ready)

    def failed(self, slots: SlotArray) -> None:
        """Learn that slots will not become readable."""
        self._collect(slots, self._failed)

    def take(self) -> Arrivals | None:
        """Return what changed since the last call; None if nothing did."""
        if not self._ready and not self._failed:
            return None
        arrivals = Arrivals(self._ready, self._failed)
        self._ready, self._failed = {}, {}
        return arrivals

    def _collect(self, slots: SlotArray, changed: dict[_Place, list[tuple[int, int]]]) -> None:
        if self._waiters:
            for slot in slots.tolist():
                for place, row in self._waiters.pop(slot, ()):
                    changed.setdefault(place, []).append((row, slot))
