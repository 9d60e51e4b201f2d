# SPDX-License-Identifier: Apache-2.0
"""Which chunks go when room is needed: victims within a class, or the least valuable region of another class."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.index.phases import READY
from kvpool.index.policy.port import Policy
from kvpool.index.regions import Region, Regions, SlotClass
from kvpool.index.slots import SlotTable
from kvpool.model.slots import SlotArray

__all__ = ["Evictor", "Victims"]

_LEAST_BATCH = 256
_AHEAD = 4
_SAMPLE = 4096
_FEW = 1 << 16
"""With so many slots, looking at all regions at once is quicker than at one after the other: by 20 times for 16 slots
in each of 32, by nothing for 2048 in each of 64."""


@dataclass(frozen=True, slots=True)
class Victims:
    """Slots that may be evicted, the least valuable first."""

    slots: SlotArray
    ranks: NDArray[np.int64]
    fresh: bool
    """True if they were looked for anew, and were not left from the last search."""

    def cost(self) -> float:
        """Return the mean rank: what evicting all of them loses."""
        return float(self.ranks.mean()) if len(self.ranks) else float("inf")


class Evictor:
    """Finds victims in batches: one search over a class serves about a sixteenth of it, or a few stores."""

    def __init__(self, slots: SlotTable, regions: Regions, policy: Policy) -> None:
        """Look for victims among *slots* as *policy* ranks them."""
        self._slots = slots
        self._regions = regions
        self._policy = policy
        self._queues: dict[SlotClass, Victims] = {}

    def victims(self, cls: SlotClass, count: int) -> Victims:
        """Return at most *count* victims of one class; fewer do not mean that there are no more."""
        queue = self._queues.get(cls)
        fresh = queue is None or len(queue.slots) < count
        if queue is None or fresh:
            # What was left is found again.
            queue = self._search(self._regions.of(cls), count)
        self._queues[cls] = Victims(queue.slots[count:], queue.ranks[count:], fresh=False)
        return self._still_true(queue.slots[:count], queue.ranks[:count], fresh)

    def forget(self, cls: SlotClass) -> None:
        """Look anew next time: victims that were found are not to be evicted after all."""
        self._queues.pop(cls, None)

    def coldest(self, count: int, holder: str) -> SlotArray:
        """Return the *count* least valuable slots of all classes of a holder."""
        return self._search([r for r in self._regions if r.cls.holder == holder], count).slots[:count]

    def evictable(self, region: Region) -> SlotArray:
        """Return the slots of a region that nobody holds."""
        base = region.number * self._regions.stride
        phase = self._slots.phase[base : base + region.count]
        pins = self._slots.pins[base : base + region.count]
        return np.flatnonzero((phase == READY) & (pins == 0)) + base

    def cheapest(self, allowed: Callable[[Region], bool]) -> tuple[Region, int, float] | None:
        """Return the allowed region with the fewest held slots, then of least value, with that number and value."""
        best = None
        for region in self._regions:
            if region.draining_since_s is not None or not allowed(region):
                continue
            slots = self.evictable(region)
            value = float(self._policy.rank(slots).mean()) if len(slots) else float("-inf")
            found = (region, region.used - len(slots), value)
            if best is None or found[1:] < best[1:]:
                best = found
        return best

    def _search(self, regions: list[Region], count: int) -> Victims:
        slots = self._evictable_of([r for r in regions if r.draining_since_s is None])
        ranks = self._policy.rank(slots)
        keep = min(len(slots), max(_AHEAD * count, _LEAST_BATCH, len(slots) // 16))
        if keep < len(slots):
            best = _lowest(ranks, keep, count)
            slots, ranks = slots[best], ranks[best]
        order = np.argsort(ranks)
        return Victims(slots[order], ranks[order], fresh=True)

    def _evictable_of(self, regions: list[Region]) -> SlotArray:
        """Return the slots of some regions that nobody holds."""
        counts = np.array([r.count for r in regions], dtype=np.int64)
        ends = np.cumsum(counts)
        if not regions or ends[-1] > _FEW:
            return np.concatenate([np.empty(0, dtype=np.int64), *map(self.evictable, regions)])
        starts = np.array([r.number for r in regions], dtype=np.int64) * self._regions.stride
        slots: SlotArray = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])
        held = (self._slots.phase[slots] != READY) | (self._slots.pins[slots] != 0)
        return np.delete(slots, held)

    def _still_true(self, slots: SlotArray, ranks: NDArray[np.int64], fresh: bool) -> Victims:
        good = (self._slots.phase[slots] == READY) & (self._slots.pins[slots] == 0)
        good &= self._policy.rank(slots) == ranks
        return Victims(slots[good], ranks[good], fresh)


def _lowest(ranks: NDArray[np.int64], about: int, least: int) -> NDArray[np.int64]:
    """Return where the lowest ranks are: *about* so many, not fewer than *least*, and no rank left out is lower.

    A limit taken from a sample spares the search most of its time, which the request loop stands still for.
    """
    sample = np.sort(ranks[:: max(1, len(ranks) // _SAMPLE)])
    lowest = np.flatnonzero(ranks <= sample[len(sample) * about // len(ranks)])
    if len(lowest) < least:
        lowest = np.argpartition(ranks, about - 1)[:about]
    return lowest
