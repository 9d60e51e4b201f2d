# SPDX-License-Identifier: Apache-2.0
"""What the verbs share: memory, index, clients, leases; and the few moves that several of them make."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvpool.config import ServerConfig
from kvpool.engine.clients import Clients
from kvpool.engine.counters import Counters
from kvpool.engine.orphans import Orphans
from kvpool.engine.ports import Arena
from kvpool.engine.sessions import Sessions
from kvpool.engine.waiting import Waiting
from kvpool.index.index import Index
from kvpool.index.leases import Leases, LookupLease, StoreLease
from kvpool.index.phases import WRITING
from kvpool.index.policy.lru import Lru
from kvpool.index.regions import Regions
from kvpool.index.sizing import Sizing
from kvpool.index.tombstones import Tombstones
from kvpool.model.errors import Busy, InvalidRange, LimitExceeded
from kvpool.model.keys import digest_list
from kvpool.model.slots import SlotArray

__all__ = ["Core"]

NO_SLOTS: Final = np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Core:
    """The engine's whole state, without its verbs."""

    config: ServerConfig
    arena: Arena
    index: Index
    sizing: Sizing
    clients: Clients
    sessions: Sessions
    freed: Tombstones
    """Lookup ids that were freed before their lookup came."""

    orphans: Orphans
    lookups: Leases[LookupLease] = field(default_factory=Leases)
    stores: Leases[StoreLease] = field(default_factory=Leases)
    waiting: Waiting = field(default_factory=Waiting)
    counters: Counters = field(default_factory=Counters)
    movers: set[bytes] = field(default_factory=set)
    """Ids of movers that are not known to be reaped."""

    watermarks: tuple[float, float] = (1.0, 1.0)
    """Shares of slots in use: above the first the background evicts, down to the second."""

    now_s: float = 0.0
    """The latest time that anybody named."""

    @classmethod
    def build(cls, config: ServerConfig, arena: Arena) -> "Core":
        """Put an empty core over *arena*."""
        clients = Clients(config.limits.clients, arena.regions * arena.stride)
        regions = Regions(arena.regions, arena.stride, arena.region_bytes, arena.format)
        index = Index(
            regions,
            Lru(arena.regions * arena.stride),
            arena.erase,
            lambda region: not clients.granted(region) and arena.writers_gone(region),
            config.leases.lookup_s,
        )
        sizing = Sizing(index, arena.retire, arena.restore)
        ended = Tombstones(config.leases.tombstone_s, config.limits.sessions)
        sessions = Sessions(config.limits.sessions, config.leases.session_idle_s, ended)
        freed = Tombstones(config.leases.tombstone_s, config.limits.leases)
        core = cls(config, arena, index, sizing, clients, sessions, freed, Orphans(arena.stride))
        index.shares.quotas.set(config.l1.quotas)
        core.watermarks = config.l1.evict_above, config.l1.evict_to
        return core

    @property
    def l1_bytes(self) -> int:
        """Bytes of the regions that may hold chunks now."""
        return (self.arena.regions - len(self.index.regions.retired)) * self.arena.region_bytes

    def keys(self, digests: bytes | memoryview) -> list[bytes]:
        """Split and check a frame of digests.

        Raises:
            InvalidRange: it is no whole number of digests, or names one twice.
            LimitExceeded: it has more chunks than one request may.
        """
        keys = digest_list(digests)
        if len(keys) > self.config.limits.chunks:
            raise LimitExceeded(f"{len(keys)} chunks in one request, the limit is {self.config.limits.chunks}")
        if len(set(keys)) != len(keys):
            raise InvalidRange("a digest is named twice in one request")
        return keys

    def check_lease_room(self) -> None:
        """Refuse another lease where as many live as the server keeps.

        Raises:
            Busy: there is no room.
        """
        if len(self.lookups) + len(self.stores) >= self.config.limits.leases:
            raise Busy(f"{self.config.limits.leases} leases are alive, and the server keeps no more (limits.leases)")

    def drop(self, slots: SlotArray) -> None:
        """Make slots unreadable for ever; lookups that wait for them learn it."""
        written = slots[self.index.slots.phase[slots] == WRITING]
        self.index.condemn(slots)
        self.waiting.failed(written)

    def abort(self, slots: SlotArray) -> None:
        """Learn that the writers of slots are over; lookups that wait for them learn it."""
        if len(slots):
            self.index.abort(slots)
            self.waiting.failed(slots)
