# SPDX-License-Identifier: Apache-2.0
"""What the engine does by itself, a little at a time."""

from typing import Final

from kvpool.engine.core import Core
from kvpool.engine.lookup import Lookups
from kvpool.engine.release import Releases
from kvpool.engine.tiers import Fetches

__all__ = ["Upkeep"]

_PROOF_S: Final = 0.5
"""How often the arena is asked about writers; it costs some system calls a region."""

_EVICT_BATCH: Final = 256
"""Chunks that one tick evicts at most: tens of microseconds."""


class Upkeep:
    """The verb tick."""

    def __init__(self, core: Core, releases: Releases, lookups: Lookups, fetches: Fetches) -> None:
        """Work on *core* and the verbs that end things."""
        self._core = core
        self._releases = releases
        self._lookups = lookups
        self._fetches = fetches
        self._proof_s = 0.0
        self._evicting: set[str] = set()
        """Holders of memory that are between their watermarks, on the way down."""

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        self._fetches.collect()
        self._lookups.arrivals()
        self._releases.expire(now_s)
        if now_s >= self._proof_s:
            self._proof_s = now_s + _PROOF_S
            self._releases.prove()
            self._core.index.settle(now_s)
            self._core.sizing.step(now_s)
        self._evict()
        self._lookups.arrivals()

    def next_s(self) -> float | None:
        """Return when there is something to do next."""
        core = self._core
        times_s = [core.lookups.next_s(), core.stores.next_s(), core.sessions.next_s(), core.freed.next_s()]
        if self._evicting:
            times_s.append(core.now_s)
        if len(core.orphans) or core.index.draining() or core.sizing.busy:
            times_s.append(self._proof_s)
        return min((t for t in times_s if t is not None), default=None)

    def _evict(self) -> None:
        """Evict a batch of each holder that uses more than the configured share, down to the lower one."""
        above, to = self._core.watermarks
        index = self._core.index
        for holder in index.shares.holders():
            excess = index.shares.excess_slots(to if holder in self._evicting else above, holder)
            if excess > 0 and holder not in self._evicting:
                excess = index.shares.excess_slots(to, holder)
            batch = min(excess, _EVICT_BATCH)
            going_on = batch > 0 and index.evict_coldest(batch, holder) == batch
            (self._evicting.add if going_on else self._evicting.discard)(holder)
