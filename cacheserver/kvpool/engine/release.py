# SPDX-License-Identifier: Apache-2.0
"""Ends: of requests, of clients, of deadlines, of whole models."""

import numpy as np

from kvpool.engine.clients import Client
from kvpool.engine.core import Core
from kvpool.engine.counters import CLEARED, EXPIRED_LOOKUPS
from kvpool.engine.lookup import Lookups
from kvpool.engine.outcomes import Cleared
from kvpool.engine.store import Stores
from kvpool.index.phases import READY
from kvpool.index.tables import KeyTable
from kvpool.model.errors import UnknownLease
from kvpool.model.slots import SERVER_OWNED

__all__ = ["Releases"]


class Releases:
    """All that gives memory back."""

    def __init__(self, core: Core, lookups: Lookups, stores: Stores) -> None:
        """Work on *core*, for the leases of *lookups* and *stores*."""
        self._core = core
        self._lookups = lookups
        self._stores = stores

    def free_lookup(self, client: Client, lookup_id: bytes, first: int, end: int, now_s: float) -> int:
        """Release chunks [first, end) of a lookup; an unknown id leaves a tombstone."""
        try:
            lease = self._lookups.live(client, lookup_id)
        except UnknownLease:
            self._core.freed.leave((client.tenant, lookup_id), now_s)
            return 0
        first, end = max(0, first), max(0, min(end, lease.asked))
        return self._lookups.free(lease, first, end) if first < end else 0

    def end_request(self, client: Client, request_id: str, now_s: float) -> int:
        """Release the lookup of a request; an unknown one leaves a tombstone."""
        session = self._core.sessions.end(client.client_id, request_id, now_s)
        return int(session is not None and session.lookup_id is not None and self._lookups.end(session.lookup_id))

    def leave(self, client_id: bytes) -> bool:
        """Forget a client and free its lookups; its writes become orphans."""
        for lookup_id in self._core.lookups.of_client(client_id):
            self._lookups.end(lookup_id)
        for key in self._core.stores.of_client(client_id):
            self._stores.lapse(key)
        self._core.sessions.forget_client(client_id)
        return self._core.clients.remove(client_id) is not None

    def writes_over(self, client_id: bytes, tenant: str | None = None) -> None:
        """Learn that a client writes no more; a *tenant* can say so only for regions that its clients may map."""
        owners = self._core.index.regions.owner
        self._core.abort(
            self._core.orphans.take_where(
                client_id, lambda region: tenant is None or owners[region] in (tenant, SERVER_OWNED)
            )
        )

    def prove(self) -> None:
        """Free orphans in regions that nothing outside can write to any more."""
        if len(self._core.orphans):
            self._core.abort(self._core.orphans.take_where(None, self._core.arena.writers_gone))

    def expire(self, now_s: float) -> None:
        """End leases whose time has come, and forget what was remembered for long enough."""
        for lookup_id in self._core.lookups.due(now_s):
            self._core.counters.add(EXPIRED_LOOKUPS, int(self._lookups.end(lookup_id)))
        for key in self._core.stores.due(now_s):
            self._stores.lapse(key, expired=True)
        self._core.sessions.expire(now_s)
        self._core.freed.expire(now_s)

    def clear(self, tenant: str | None, model: str, *, forced: bool) -> Cleared:
        """Drop chunks of a tenant (None: of all) and a model (empty: of all)."""
        cleared = kept = 0
        for scope in self._core.index.scopes:
            if tenant in (None, scope.tenant) and model in ("", scope.model):
                for table in scope.tables.values():
                    gone, left = self._clear_table(table, forced=forced)
                    cleared, kept = cleared + gone, kept + left
        self._core.counters.add(CLEARED, cleared)
        return Cleared(cleared, kept)

    def _clear_table(self, table: KeyTable, *, forced: bool) -> tuple[int, int]:
        slots = np.fromiter(table.slots.values(), np.int64, len(table.slots))
        index = self._core.index.slots
        unheld = (index.phase[slots] == READY) & (index.pins[slots] == 0)
        gone = slots if forced else slots[unheld]
        self._core.drop(gone)
        return len(gone), len(slots) - len(gone)
