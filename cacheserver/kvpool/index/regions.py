# SPDX-License-Identifier: Apache-2.0
"""Which region serves which class of slots, and which of its slots are free."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.index.quotas import EVERYBODY
from kvpool.model.slots import SlotArray

__all__ = ["Region", "Regions", "SlotClass"]


class SlotClass(NamedTuple):
    """Slots that may stand for one another."""

    slot_bytes: int
    owner: str
    """Tenant whose clients may map the region, or ``SERVER_OWNED``."""

    holder: str = EVERYBODY
    """Whose share of the memory it is, see ``quotas``."""


@dataclass(slots=True, eq=False)
class Region:
    """One formatted region. Free positions are a stack, so taking and giving back costs O(1) a slot."""

    number: int
    cls: SlotClass
    count: int
    free: NDArray[np.int32]
    """The first ``top`` entries are the free positions."""

    top: int
    draining_since_s: float | None = None

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.count - self.top

    def take(self, count: int) -> NDArray[np.int32]:
        """Take *count* free positions."""
        self.top -= count
        return self.free[self.top : self.top + count].copy()

    def give(self, positions: SlotArray) -> None:
        """Give positions back."""
        self.free[self.top : self.top + len(positions)] = positions
        self.top += len(positions)


@dataclass(slots=True)
class _Pool:
    """The regions of one class, and those of them that slots are taken from next."""

    regions: list[Region] = field(default_factory=list)
    open: list[Region] = field(default_factory=list)


class Regions:
    """The arena's regions: empty ones, and those cut into slots of one class each."""

    def __init__(self, count: int, stride: int, region_bytes: int, fmt: Callable[[int, int, str], int]) -> None:
        """Start with *count* empty regions; *fmt* cuts one into slots and says how many."""
        self.stride = stride
        self.region_bytes = region_bytes
        self.slot_bytes: NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        """Bytes of one slot, by region; 0 while it is empty."""
        self.owner: list[str | None] = [None] * count
        """Who may map the bytes, by region; survives until another owner takes the region over."""
        self.empty = list(range(count - 1, -1, -1))
        self.retired: list[int] = []
        """Regions that are not to be used for now: neither empty nor cut."""
        self.leaving: set[int] = set()
        """Draining regions that are retired, not empty, once their last slot came back."""
        self.draining: dict[int, Region] = {}
        """Regions that no new slots are taken from, by number."""
        self.slots = 0
        self.cut_bytes = 0
        """Bytes of all slots that exist, free or not."""
        self.slots_used = 0
        self.used_bytes = 0
        self._format = fmt
        self._held: Counter[str] = Counter()
        self._regions: list[Region | None] = [None] * count
        self._pools: dict[SlotClass, _Pool] = {}

    def __iter__(self) -> Iterator[Region]:
        return (r for r in self._regions if r is not None)

    def of(self, cls: SlotClass) -> list[Region]:
        """Return the regions of a class."""
        return self._pools[cls].regions if cls in self._pools else []

    def open(self, number: int, cls: SlotClass) -> Region:
        """Cut an empty region into slots of *cls*, all free."""
        count = self._format(number, cls.slot_bytes, cls.owner)
        return self._add(number, cls, np.arange(count - 1, -1, -1, dtype=np.int32), count)

    def adopt(self, number: int, cls: SlotClass, held: SlotArray) -> Region:
        """Take over a region of a former server; *held* are its positions in use."""
        count = min(self.region_bytes // cls.slot_bytes, self.stride)
        is_free = np.ones(count, dtype=np.bool_)
        is_free[held] = False
        free = np.flatnonzero(is_free)[::-1]
        self.slots_used += count - len(free)
        self.used_bytes += (count - len(free)) * cls.slot_bytes
        return self._add(number, cls, free, count)

    def take(self, cls: SlotClass, count: int) -> SlotArray:
        """Take up to *count* free slots of a class."""
        pool = self._pools.get(cls)
        parts = []
        while count and pool and pool.open:
            region = pool.open[-1]
            # In order: chunks that lie one behind the other are copied at once.
            part = np.sort(region.take(min(count, region.top)))
            if not region.top:
                pool.open.pop()
            parts.append(part + np.int64(region.number * self.stride))
            count -= len(part)
        slots = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        self._count(len(slots), cls)
        return slots

    def give(self, slots: SlotArray) -> None:
        """Give slots back; a draining region whose last one comes back is empty."""
        numbers, positions = np.divmod(slots, self.stride)
        for number in sorted(set(numbers.tolist())):
            region = self._regions[number]
            assert region is not None, "slots exist in formatted regions alone"
            part = positions[numbers == number]
            self._reopen(region)
            region.give(part)
            self._count(-len(part), region.cls)
            if region.draining_since_s is not None and not region.used:
                self.close(region)

    def drain(self, region: Region, now_s: float) -> None:
        """Take no new slots from a region; it becomes empty once all of its slots came back."""
        region.draining_since_s = now_s
        self.draining[region.number] = region
        pool = self._pools[region.cls]
        if region in pool.open:
            pool.open.remove(region)
        if not region.used:
            self.close(region)

    def undrain(self, region: Region) -> None:
        """Let slots be taken from a region again."""
        region.draining_since_s = None
        self.draining.pop(region.number, None)
        if region.top:
            self._pools[region.cls].open.append(region)

    def close(self, region: Region) -> None:
        """Make a region without used slots empty."""
        pool = self._pools[region.cls]
        pool.regions.remove(region)
        if region in pool.open:
            pool.open.remove(region)
        self._regions[region.number] = None
        self.draining.pop(region.number, None)
        self.slot_bytes[region.number] = 0
        self.slots -= region.count
        self.cut_bytes -= region.count * region.cls.slot_bytes
        self._held[region.cls.holder] -= 1
        (self.retired if region.number in self.leaving else self.empty).append(region.number)
        self.leaving.discard(region.number)

    def held_by(self, holder: str) -> int:
        """Return how many regions a holder has, without those that are to be retired."""
        leaving = (self._regions[number] for number in self.leaving)
        return self._held[holder] - sum(r is not None and r.cls.holder == holder for r in leaving)

    @property
    def usable(self) -> int:
        """Regions that are not retired and not on their way there."""
        return len(self.owner) - len(self.retired) - len(self.leaving)

    def retire(self, number: int) -> None:
        """Take an empty region out of use."""
        self.empty.remove(number)
        self.retired.append(number)

    def restore(self, number: int) -> None:
        """Put a retired region into use again, empty."""
        self.retired.remove(number)
        self.empty.append(number)

    def _add(self, number: int, cls: SlotClass, free: NDArray[Any], count: int) -> Region:
        region = Region(
            number, cls, count, np.resize(free, count) if len(free) else np.zeros(count, np.int32), len(free)
        )
        self._regions[number] = region
        self.slot_bytes[number] = cls.slot_bytes
        self.owner[number] = cls.owner
        self._held[cls.holder] += 1
        self.slots += count
        self.cut_bytes += count * cls.slot_bytes
        self.empty.remove(number)
        pool = self._pools.setdefault(cls, _Pool())
        pool.regions.append(region)
        if region.top:
            pool.open.append(region)
        return region

    def _reopen(self, region: Region) -> None:
        if not region.top and region.draining_since_s is None:
            self._pools[region.cls].open.append(region)

    def _count(self, slots: int, cls: SlotClass) -> None:
        self.slots_used += slots
        self.used_bytes += slots * cls.slot_bytes
