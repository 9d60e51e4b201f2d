# SPDX-License-Identifier: Apache-2.0
"""The engine's numbers, for status and metrics."""

from kvpool.engine.clients import Client
from kvpool.engine.core import Core
from kvpool.engine.counters import EVICTED, ILLEGAL_MOVES
from kvpool.engine.outcomes import ClientNumbers, EngineNumbers, ScopeNumbers

__all__ = ["client_numbers", "engine_numbers", "scope_numbers"]


def engine_numbers(core: Core) -> EngineNumbers:
    """Return the numbers of the whole engine, as of the latest time that it was told."""
    index, regions = core.index, core.index.regions
    began_s = [t for t in (core.lookups.oldest_s(), core.stores.oldest_s()) if t is not None]
    return EngineNumbers(
        slots=regions.slots,
        slots_used=regions.slots_used,
        l1_bytes=core.l1_bytes,
        l1_wanted_bytes=core.sizing.wanted * core.arena.region_bytes,
        l1_mapped_bytes=len(core.sizing.mapped()) * core.arena.region_bytes,
        used_bytes=regions.used_bytes,
        pinned_bytes=index.pinned_bytes,
        quarantined_bytes=index.lapsed_bytes,
        chunks=index.chunks,
        regions=core.arena.regions - len(regions.retired),
        regions_empty=len(regions.empty),
        regions_draining=index.draining(),
        clients=len(core.clients),
        sessions=len(core.sessions),
        leases=len(core.lookups) + len(core.stores),
        oldest_lease_s=max(0.0, core.now_s - min(began_s, default=core.now_s)),
        counters=core.counters.snapshot({EVICTED: index.evicted, ILLEGAL_MOVES: index.slots.illegal_moves}),
    )


def client_numbers(core: Core, client: Client, now_s: float) -> ClientNumbers:
    """Return the numbers of one client."""
    registration = client.registration
    stores = [core.stores.get(key) for key in core.stores.of_client(client.client_id)]
    held = [store.held() for store in stores if store] + [core.orphans.of_writer(client.client_id)]
    return ClientNumbers(
        client_id=client.client_id,
        label=client.label,
        tenant=client.tenant,
        kind=client.kind,
        role=client.role,
        mode=registration.mode if registration else None,
        model=registration.scope.model if registration else "",
        pinned_bytes=client.ledger.bytes,
        held_bytes=sum(int(core.index.bytes_of(slots).sum()) for slots in held),
        lookups=len(core.lookups.of_client(client.client_id)),
        stores=len(stores),
        idle_s=max(0.0, now_s - client.seen_s),
    )


def scope_numbers(core: Core) -> list[ScopeNumbers]:
    """Return what is kept of each model of each tenant."""
    pieces: dict[tuple[str, str], int] = {}
    for scope in core.index.scopes:
        name = scope.tenant, scope.model
        pieces[name] = pieces.get(name, 0) + sum(len(table.slots) for table in scope.tables.values())
    return [ScopeNumbers(tenant, model, chunks) for (tenant, model), chunks in sorted(pieces.items())]
