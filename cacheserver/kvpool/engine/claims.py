# SPDX-License-Identifier: Apache-2.0
"""What movers may touch: slots that a client's stores and loads reach through a process of the server's.

A mover may go on copying after its client, its store or its lookup ended. So each slot that was granted to it stays
held until the mover has said that it copies no more, or is reaped.
"""

import numpy as np

from kvpool.engine.core import Core
from kvpool.engine.counters import CHECKSUM_MISMATCHES
from kvpool.engine.lookup import Lookups
from kvpool.engine.release import Releases
from kvpool.index.phases import READY
from kvpool.model.slots import SERVER_OWNED, SlotArray

__all__ = ["MoverClaims"]


class MoverClaims:
    """The verbs that concern movers. Ids of movers have 16 bytes and are never used again."""

    def __init__(self, core: Core, releases: Releases, lookups: Lookups) -> None:
        """Work on *core*."""
        self._core = core
        self._releases = releases
        self._lookups = lookups

    def attach(self, client_id: bytes, mover: bytes) -> None:
        """Let a mover carry the chunks of a client's stores and loads that begin from now on."""
        client = self._core.clients.find(client_id)
        if client is not None:
            self._core.movers.add(mover)
            client.mover = mover

    def detach(self, client_id: bytes, mover: bytes) -> None:
        """Let the client's next chunks be streamed. What was granted to the mover stays held."""
        client = self._core.clients.find(client_id)
        if client is not None and client.mover == mover:
            client.mover = b""

    def reaped(self, mover: bytes) -> None:
        """Learn that a mover does not exist any more."""
        self._core.movers.discard(mover)
        self._core.abort(self._core.orphans.take_where(mover, lambda _: True))
        self._lookups.arrivals()

    def store_lives(self, client_id: bytes, store_id: bytes) -> bool:
        """True while a store may still be committed."""
        return self._core.stores.get(client_id + store_id) is not None

    def store_over(self, client_id: bytes, store_id: bytes) -> None:
        """Learn that no mover writes any more for a store that ended without a commit."""
        self._core.abort(self._core.orphans.take(client_id + store_id))
        self._lookups.arrivals()

    def lookup_lives(self, lookup_id: bytes) -> bool:
        """True while chunks of a lookup may still be loaded."""
        return self._core.lookups.get(lookup_id) is not None

    def hold(self, slots: SlotArray) -> None:
        """Hold slots that a lookup has pinned for a mover that reads them."""
        if len(slots):
            self._core.index.pin(slots, 1)

    def let_go(self, slots: SlotArray) -> None:
        """End ``hold``."""
        if len(slots):
            self._core.index.unpin(slots, 1)

    def damaged(self, slots: SlotArray) -> None:
        """Drop chunks that are not what was stored, as a mover found; those dropped already are not counted again."""
        there = slots[self._core.index.slots.phase[slots] == READY]
        if len(there):
            self._core.drop(there)
            self._core.counters.add(CHECKSUM_MISMATCHES, len(there))
            self._lookups.arrivals()

    def memories(self) -> set[int]:
        """Return the numbers of the memory that movers may write to now or later: of regions that are no tenant's."""
        owners = self._core.index.regions.owner
        mine = np.array([n for n, owner in enumerate(owners) if owner in (None, SERVER_OWNED)], dtype=np.int64)
        return set(self._core.arena.memories(mine).tolist())

    def former_gone(self) -> bool:
        """True once no mover of a former server can write any more; then what they left half-written is free.

        They hold the locks of the regions that they mapped, also while they linger in a driver's call. To be asked
        before this server's first mover maps anything.
        """
        regions = self._core.index.regions
        mine = [r.number for r in regions if r.cls.owner == SERVER_OWNED]
        gone = all(self._core.arena.writers_gone(number) for number in mine)
        if gone:
            self._releases.prove()
        return gone
