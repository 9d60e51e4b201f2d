# SPDX-License-Identifier: Apache-2.0
"""Lookup: the longest prefix that all shards and groups hold, pinned; and what becomes of the chunks behind it."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.engine.clients import Client, Registration, group_reach, slot_bytes_of
from kvpool.engine.core import Core
from kvpool.engine.counters import HIT_TOKENS, LOOKUP_TOKENS, LOOKUPS
from kvpool.engine.outcomes import FoundPrefix
from kvpool.engine.pinning import pin_rows, release_rows, room_bytes
from kvpool.engine.tiers import Fetches
from kvpool.index.leases import Holding, LookupLease
from kvpool.index.phases import READY, WRITING
from kvpool.index.prefix import longest, needed, pin_costs, restorable
from kvpool.model.errors import InvalidRange, UnknownLease
from kvpool.model.reasons import LookupReason

__all__ = ["Lookups"]

Masks = list[NDArray[np.bool_]]


class Lookups:
    """The verbs lookup and lookup_status, and all that ends a lookup."""

    def __init__(self, core: Core, fetches: Fetches) -> None:
        """Work on *core*; *fetches* brings chunks from tiers."""
        self._core = core
        self._fetches = fetches
        self._resolved: dict[bytes, None] = {}

    def lookup(
        self,
        client: Client,
        request_id: str,
        lookup_id: bytes,
        shards: Sequence[int],
        digests: bytes | memoryview,
        now_s: float,
    ) -> FoundPrefix:
        """Find and pin; see ``Engine.lookup``."""
        registration = client.loader()
        keys = self._core.keys(digests)
        self._check_shards(registration, shards)
        self._check_id(client, lookup_id)
        session = self._core.sessions.get(client.client_id, request_id)
        if session is not None and session.lookup_id is not None:
            self.end(session.lookup_id)  # a second lookup of a request replaces the first
        self._core.check_lease_room()
        session = self._core.sessions.open(client.client_id, request_id, now_s)
        early = session is None or self._core.freed.take((client.tenant, lookup_id), now_s)
        if early or not keys:
            return self._count(FoundPrefix(0, 0, LookupReason.ENDED if early else LookupReason.SHORT), len(keys))
        ledger, readers = client.ledger, registration.readers
        lease = LookupLease(
            lookup_id, client.client_id, request_id, registration.scope, readers, ledger, now_s, len(keys)
        )
        self._fill(lease, shards, keys)
        found = self._pin(client, lease, keys, now_s)
        if found.chunks or found.coming:
            assert session is not None, "an early end was answered above"
            session.lookup_id = lookup_id
            self._core.lookups.add(lookup_id, lease, now_s + self._core.config.leases.lookup_s)
        return self._count(found, len(keys))

    def status(self, client: Client, lookup_id: bytes) -> FoundPrefix:
        """Say how a lookup stands; see ``Engine.lookup_status``."""
        lease = self.live(client, lookup_id)
        return FoundPrefix(lease.chunks, lease.coming, lease.reason)

    def live(self, client: Client, lookup_id: bytes) -> LookupLease:
        """Return a live lookup of the caller's scope.

        Raises:
            UnknownLease: it ended, never was, or is another tenant's or namespace's.
        """
        lease = self._core.lookups.get(lookup_id)
        if lease is None or lease.scope is not client.registered().scope:
            raise UnknownLease("no such lookup: it ended, ran out, or never was")
        return lease

    def free(self, lease: LookupLease, first: int, end: int) -> int:
        """Release what a lookup still holds of chunks [first, end); returns how many chunks had a pin."""
        freed = np.zeros(lease.asked, dtype=np.bool_)
        for holding in lease.holdings.values():
            rows = np.flatnonzero(holding.shares[first:end]) + first
            freed[rows] = True
            release_rows(self._core, lease, holding, rows)
            holding.coming[first:end] = False
        self._refresh(lease)
        if not lease.unread():
            self.end(lease.lookup_id)
        return int(np.count_nonzero(freed))

    def end(self, lookup_id: bytes) -> bool:
        """Release all that a lookup holds and forget it; it need not be known."""
        lease = self._core.lookups.pop(lookup_id)
        if lease is None:
            return False
        for holding in lease.holdings.values():
            release_rows(self._core, lease, holding, np.flatnonzero(holding.shares))
        session = self._core.sessions.get(lease.client_id, lease.request_id)
        if session is not None and session.lookup_id == lookup_id:
            session.lookup_id = None
        if lease.coming:
            self._resolved[lookup_id] = None
        return True

    def take_resolved(self) -> list[bytes]:
        """Return the lookups whose answer changed since the last call."""
        resolved = list(self._resolved)
        self._resolved.clear()
        return resolved

    def arrivals(self) -> None:
        """Pin what became ready for lookups that wait for it, and give up what failed."""
        arrivals = self._core.waiting.take()
        if arrivals is None:
            return
        changed: dict[bytes, LookupLease] = {}
        for (lookup_id, table), rows in [*arrivals.ready.items(), *arrivals.failed.items()]:
            lease = self._core.lookups.get(lookup_id)
            holding = lease.holdings.get(table) if lease else None
            if lease and holding:
                self._arrived(lease, holding, rows)
                changed[lookup_id] = lease
        for lease in changed.values():
            self._refresh(lease)

    def _arrived(self, lease: LookupLease, holding: Holding, rows: Iterable[tuple[int, int]]) -> None:
        """Learn what became of awaited slots; an entry may be of a former lookup with the same id."""
        mine = [row for row, slot in rows if holding.coming[row] and holding.slots[row] == slot]
        at = np.asarray(mine, dtype=np.int64)
        holding.coming[at] = False
        ready = self._core.index.slots.phase[holding.slots[at]] == READY
        pin_rows(self._core, lease, holding, at[ready])
        holding.slots[at[~ready]] = -1

    def _refresh(self, lease: LookupLease) -> None:
        """Compute a waiting lookup's answer anew from what it holds by now, and let go what it needs no more."""
        if not lease.coming:
            return
        before = lease.chunks, lease.coming
        row = np.arange(lease.asked)
        # What was found before counts even if it was read and released since.
        have = [(h.shares > 0) | (row < lease.chunks) for h in lease.holdings.values()]
        reaches = [h.reach for h in lease.holdings.values()]
        lease.chunks = longest(restorable(have, reaches))
        coming = [a | h.coming for a, h in zip(have, lease.holdings.values(), strict=True)]
        lease.coming = longest(restorable(coming, reaches)) - lease.chunks
        self._trim(lease)
        if (lease.chunks, lease.coming) != before:
            self._resolved[lease.lookup_id] = None
            self._core.counters.add(HIT_TOKENS, (lease.chunks - before[0]) * self._core.config.chunk_tokens)
            if lease.chunks == lease.asked:
                lease.reason = LookupReason.ALL

    def _trim(self, lease: LookupLease) -> None:
        for holding in lease.holdings.values():
            excess = np.ones(lease.asked, dtype=np.bool_)
            excess[needed(lease.chunks, holding.reach)] = False
            excess[needed(lease.chunks + lease.coming, holding.reach)] = False
            holding.coming[excess] = False
            release_rows(self._core, lease, holding, np.flatnonzero(excess & (holding.shares > 0)))

    def _check_shards(self, registration: Registration, shards: Sequence[int]) -> None:
        if not shards or len(set(shards)) != len(shards) or not registration.shards.issuperset(shards):
            raise InvalidRange(f"shards {list(shards)} are not all of those registered, {sorted(registration.shards)}")

    def _check_id(self, client: Client, lookup_id: bytes) -> None:
        lease = self._core.lookups.get(lookup_id)
        if lease is not None:
            if lease.client_id != client.client_id:
                raise InvalidRange("this lookup id is in use by another client")
            self.end(lookup_id)

    def _fill(self, lease: LookupLease, shards: Sequence[int], keys: list[bytes]) -> None:
        """Find the slots of all chunks in all tables."""
        for group, spec in enumerate(lease.scope.groups):
            reach = group_reach(spec, self._core.config.chunk_tokens, len(keys))
            for shard in shards:
                table = self._core.index.scopes.table(lease.scope, group, shard)
                lease.holdings[group, shard] = Holding(
                    table,
                    reach,
                    slot_bytes_of(spec),
                    table.find(keys),
                    np.zeros(len(keys), dtype=np.int32),
                    np.zeros(len(keys), dtype=np.bool_),
                )

    def _pin(self, client: Client, lease: LookupLease, keys: list[bytes], now_s: float) -> FoundPrefix:
        """Pin what the longest restorable prefix needs, and what is there of a longer one that is coming."""
        holdings = list(lease.holdings.values())
        reaches = [h.reach for h in holdings]
        ready = [self._in_phase(h, READY) for h in holdings]
        held = restorable(ready, reaches)
        there = longest(held)
        affordable = self._affordable(client, holdings)
        lease.chunks = there if affordable[there] else longest(held & affordable)
        lease.reason = self._reason(lease, ready, there)
        if there == lease.chunks < lease.asked:
            wanted = self._fetches.wanted(holdings, keys)
            maybe = [r | self._in_phase(h, WRITING) | w for r, h, w in zip(ready, holdings, wanted, strict=True)]
            lease.coming = longest(restorable(maybe, reaches) & affordable) - lease.chunks
        for holding, here in zip(holdings, ready, strict=True):
            rows = np.zeros(lease.asked, dtype=np.bool_)
            rows[needed(lease.chunks, holding.reach)] = True
            if lease.coming:
                rows[needed(lease.chunks + lease.coming, holding.reach)] = True
            pin_rows(self._core, lease, holding, np.flatnonzero(rows & here), use=True)
            holding.coming = rows & ~here
        if lease.coming:
            self._await(lease, keys, now_s)
        return FoundPrefix(lease.chunks, lease.coming, lease.reason)

    def _in_phase(self, holding: Holding, phase: int) -> NDArray[np.bool_]:
        is_in: NDArray[np.bool_] = (holding.slots >= 0) & (self._core.index.slots.phase[holding.slots] == phase)
        return is_in

    def _affordable(self, client: Client, holdings: list[Holding]) -> NDArray[np.bool_]:
        """Return which lengths may be pinned without taking more than the client's and the server's share."""
        everywhere, here = room_bytes(self._core, client)
        asked = len(holdings[0].slots)
        if sum(min(asked, h.reach) * h.slot_bytes for h in holdings) <= min(everywhere, here):
            return np.ones(asked + 1, dtype=np.bool_)
        reaches = [h.reach for h in holdings]
        new = [np.where(self._pinned_by_any(h), 0, h.slot_bytes) for h in holdings]
        mine = [np.where((h.slots >= 0) & client.ledger.pinned(h.slots), 0, h.slot_bytes) for h in holdings]
        affordable = (pin_costs(new, reaches) <= everywhere) & (pin_costs(mine, reaches) <= here)
        affordable[0] = True  # also where chunks that were waited for have overdrawn the share
        return affordable

    def _pinned_by_any(self, holding: Holding) -> NDArray[np.bool_]:
        pinned: NDArray[np.bool_] = (holding.slots >= 0) & (self._core.index.slots.pins[holding.slots] > 0)
        return pinned

    def _reason(self, lease: LookupLease, ready: Masks, held: int) -> LookupReason:
        if lease.chunks == lease.asked:
            return LookupReason.ALL
        if lease.chunks < held:
            return LookupReason.PIN_LIMIT
        if any(mask[lease.chunks] for mask in ready):
            return LookupReason.INCOMPLETE
        if not lease.chunks and lease.scope.empty() and self._other_layout(lease):
            return LookupReason.OTHER_LAYOUT
        return LookupReason.MISSING

    def _other_layout(self, lease: LookupLease) -> bool:
        scope = lease.scope
        return any(
            s.model == scope.model and s.tenant == scope.tenant and not s.empty() for s in self._core.index.scopes
        )

    def _await(self, lease: LookupLease, keys: list[bytes], now_s: float) -> None:
        """Be told of the slots that are coming, after asking the tiers for those that nobody writes yet."""
        for table, holding in lease.holdings.items():
            unasked = np.flatnonzero(holding.coming & (holding.slots < 0))
            self._fetches.start(holding, unasked, keys, now_s)
            holding.coming &= holding.slots >= 0  # there may have been no room
            for row in np.flatnonzero(holding.coming).tolist():
                self._core.waiting.add(int(holding.slots[row]), lease.lookup_id, table, row)
        self._refresh(lease)
        self._resolved.pop(lease.lookup_id, None)

    def _count(self, found: FoundPrefix, asked: int) -> FoundPrefix:
        counters = self._core.counters
        counters.add(LOOKUPS[found.reason])
        counters.add(LOOKUP_TOKENS, asked * self._core.config.chunk_tokens)
        counters.add(HIT_TOKENS, found.chunks * self._core.config.chunk_tokens)
        return found
