# SPDX-License-Identifier: Apache-2.0
"""How many regions are in use: more at once, fewer as fast as the ones that must go come free.

A region goes in three steps. It is emptied: nothing new comes in, what nobody holds is evicted at once, what is held as
soon as it is let go. It is retired: its room is gone. Its memory is given back: once no client has it mapped any more.
"""

from collections.abc import Callable

from kvpool.index.index import Index

__all__ = ["Sizing"]


class Sizing:
    """Brings the regions in use to the number wanted, a little at each step. All calls come from one thread."""

    def __init__(self, index: Index, give_back: Callable[[int], None], take_back: Callable[[int], None]) -> None:
        """Want all regions.

        Args:
            index: whose regions.
            give_back: told of a retired region that nothing outside can reach: its memory goes.
            take_back: told of such a region that is used again.
        """
        self._index = index
        self._regions = index.regions
        self._give_back, self._take_back = give_back, take_back
        self._gone: set[int] = set()
        self.wanted = len(self._regions.owner)

    def want(self, count: int, now_s: float) -> None:
        """Change how many regions are wanted; what can be done at once is."""
        self.wanted = count
        self.step(now_s)

    def step(self, now_s: float) -> None:
        """Go on; begins to empty at most one region that holds something, so that the loop never waits long."""
        self._restore()
        self._retire(now_s)
        self._enforce(now_s)
        for number in self.mapped():
            if self._index.may_change_owner(number):
                self._give_back(number)
                self._regions.owner[number] = None
                self._gone.add(number)

    def _enforce(self, now_s: float) -> None:
        """Let whoever has more than its share give up a region, one at a time."""
        over = self._index.shares.over() if not self._index.draining() else set()
        if over:
            self._index.begin_to_empty(lambda r: r.cls.holder in over, now_s)

    @property
    def excess(self) -> int:
        """Regions that hold something and must go, on their way or not."""
        return max(0, len(self._regions.owner) - len(self._regions.retired) - self.wanted)

    def mapped(self) -> list[int]:
        """Retired regions whose memory some client still has."""
        return [n for n in self._regions.retired if n not in self._gone]

    @property
    def busy(self) -> bool:
        """True while a step may have something to do."""
        return bool(self.excess or self.mapped())

    def _restore(self) -> None:
        regions = self._regions
        for region in [r for r in regions if r.number in regions.leaving]:
            if regions.usable < self.wanted:
                regions.leaving.discard(region.number)
                regions.undrain(region)
        while regions.usable < self.wanted and regions.retired:
            # First those that still have their memory.
            number = next(iter(self.mapped()), regions.retired[-1])
            regions.restore(number)
            if number in self._gone:
                self._gone.discard(number)
                self._take_back(number)

    def _retire(self, now_s: float) -> None:
        regions = self._regions
        while regions.usable > self.wanted and regions.empty:
            free = (n for n in regions.empty if self._index.may_change_owner(n))
            regions.retire(next(free, regions.empty[0]))
        if regions.usable > self.wanted:
            self._index.begin_to_empty(lambda _: True, now_s, retire=True)
