# SPDX-License-Identifier: Apache-2.0
"""Unreadable slots that an absent or late writer may still write to, until there is proof that it does not."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvpool.model.slots import SlotArray

__all__ = ["Orphan", "Orphans"]


@dataclass(frozen=True, slots=True, eq=False)
class Orphan:
    """The slots of one store that outlived its lease, or that a former server's client left half-written."""

    writer: bytes
    """Id of the client; zeros if nobody knows."""

    slots: SlotArray


class Orphans:
    """Orphans by the key of their store. There are few, and the ways to find them are walked seldom."""

    def __init__(self, stride: int) -> None:
        """Start with none; *stride* tells a slot's region."""
        self._stride = stride
        self._orphans: dict[bytes, Orphan] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def add(self, key: bytes, writer: bytes, slots: SlotArray) -> None:
        """Keep the slots of one store."""
        if len(slots):
            self._orphans[key] = Orphan(writer, slots)

    def take(self, key: bytes) -> SlotArray:
        """Return and forget the slots of one store: its writer said that it is over."""
        orphan = self._orphans.pop(key, None)
        return orphan.slots if orphan else np.empty(0, dtype=np.int64)

    def take_where(self, writer: bytes | None, region_is: Callable[[int], bool]) -> SlotArray:
        """Return and forget the slots of *writer* (None: of anybody) in regions for which *region_is* holds."""
        taken = [np.empty(0, dtype=np.int64)]
        for key, orphan in list(self._orphans.items()):
            if writer is None or orphan.writer == writer:
                taken.append(self._split(key, orphan, region_is))
        return np.concatenate(taken)

    def regions(self) -> set[int]:
        """Return the regions that orphans lie in."""
        return {r for o in self._orphans.values() for r in (o.slots // self._stride).tolist()}

    def of_writer(self, writer: bytes) -> SlotArray:
        """Return the slots that *writer* may still write to."""
        found = [o.slots for o in self._orphans.values() if o.writer == writer]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _split(self, key: bytes, orphan: Orphan, region_is: Callable[[int], bool]) -> SlotArray:
        regions = (orphan.slots // self._stride).tolist()
        chosen = {region for region in set(regions) if region_is(region)}
        gone = np.array([region in chosen for region in regions], dtype=np.bool_)
        del self._orphans[key]
        self.add(key, orphan.writer, orphan.slots[~gone])
        taken: SlotArray = orphan.slots[gone]
        return taken
