# SPDX-License-Identifier: Apache-2.0
"""Who has how much of the memory, against what the quotas say."""

import math

from kvpool.index.quotas import EVERYBODY, Quotas
from kvpool.index.regions import Regions

__all__ = ["Shares"]


class Shares:
    """The quotas, over the regions that there are."""

    def __init__(self, regions: Regions) -> None:
        """Start without quotas."""
        self.quotas = Quotas()
        self._regions = regions

    def holders(self) -> set[str]:
        """Return whoever has regions or may have."""
        return {*self.quotas.holders(), *(r.cls.holder for r in self._regions)}

    def used_up(self, holder: str) -> bool:
        """True if a holder may have no further region."""
        return self._regions.held_by(holder) >= self._allowed(holder)

    def over(self) -> set[str]:
        """Return the holders that have more than their share; whose quota was taken away has none."""
        return {h for h in self.holders() if self._regions.held_by(h) > self._allowed(h)}

    def excess_slots(self, share: float, holder: str = EVERYBODY) -> int:
        """Return how many slots must go until at most *share* of a holder's memory is used; what is not cut is not."""
        mine = [r for r in self._regions if r.cls.holder == holder]
        used_bytes = sum(r.used * r.cls.slot_bytes for r in mine)
        room_bytes = sum(r.count * r.cls.slot_bytes for r in mine)
        room_bytes += max(0, self._allowed(holder) - len(mine)) * self._regions.region_bytes
        excess_bytes = used_bytes - share * room_bytes
        return math.ceil(excess_bytes * sum(r.used for r in mine) / used_bytes) if excess_bytes > 0 else 0

    def _allowed(self, holder: str) -> int:
        return self.quotas.regions(holder, self._regions.usable)
