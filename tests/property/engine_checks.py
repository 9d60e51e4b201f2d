# SPDX-License-Identifier: Apache-2.0
"""What must hold in an engine between any two calls: every pin, slot and byte is accounted for by a holder."""

from collections import Counter

import numpy as np

from kvpool.engine.core import Core
from kvpool.engine.engine import Engine
from kvpool.index.phases import Phase


def check(engine: Engine) -> None:
    core = engine._core
    check_pins(core, engine)
    check_keys(core)
    check_writers(core, engine)
    check_regions(core)


def check_pins(core: Core, engine: Engine) -> None:
    """Pins are exactly what lookups and running copies hold, with the slot and with the client."""
    pins: Counter[int] = Counter()
    ledgers: dict[int, Counter[int]] = {}
    for lease in core.lookups:
        mine = ledgers.setdefault(id(lease.ledger), Counter())
        for holding in lease.holdings.values():
            rows = np.flatnonzero(holding.shares)
            held = dict(zip(holding.slots[rows].tolist(), holding.shares[rows].tolist(), strict=True))
            pins.update(held)
            mine.update(held)
    for slots in engine._retrieves._reads.values():
        pins.update(slots)
    at = np.flatnonzero(core.index.slots.pins)
    assert dict(zip(at.tolist(), core.index.slots.pins[at].tolist(), strict=True)) == dict(pins)
    assert core.index.pinned_bytes == int(core.index.bytes_of(at).sum())
    for client in core.clients:
        slots = np.array(sorted(ledgers.get(id(client.ledger), ())), dtype=np.int64)
        assert client.ledger.bytes == int(core.index.bytes_of(slots).sum())


def check_keys(core: Core) -> None:
    """Exactly the slots that are written or readable are in a table, each under its own digest."""
    phase = core.index.slots.phase
    indexed = set()
    for scope in core.index.scopes:
        for table in scope.tables.values():
            for key, slot in table.slots.items():
                assert core.index.slots.key[slot] is key
                assert core.index.slots.table[slot] == table.number
                indexed.add(slot)
    assert indexed == set(np.flatnonzero((phase == Phase.WRITING) | (phase == Phase.READY)).tolist())
    assert core.index.chunks == int(np.count_nonzero(phase == Phase.READY))


def check_writers(core: Core, engine: Engine) -> None:
    """Each slot that may be written has exactly one writer that is waited for."""
    held: list[int] = []
    for store in (*core.stores, *engine._stores._lingering.values()):
        held += store.held().tolist()
    for fetch in engine._upkeep._fetches._fetches.values():
        held.append(fetch.slot)
    for orphan in core.orphans._orphans.values():
        held += orphan.slots.tolist()
    phase = core.index.slots.phase
    assert sorted(held) == np.flatnonzero((phase == Phase.WRITING) | (phase == Phase.LAPSED)).tolist()
    lapsed = np.flatnonzero(phase == Phase.LAPSED)
    assert core.index.lapsed_bytes == int(core.index.bytes_of(lapsed).sum())


def check_regions(core: Core) -> None:
    """Free stacks hold exactly the free slots, and the sums are right."""
    regions, phase = core.index.regions, core.index.slots.phase
    used = used_bytes = slots = 0
    for region in regions:
        base = region.number * regions.stride
        free = np.flatnonzero(phase[base : base + region.count] == Phase.FREE)
        assert sorted(region.free[: region.top].tolist()) == free.tolist()
        used += region.used
        used_bytes += region.used * region.cls.slot_bytes
        slots += region.count
    for number in regions.empty:
        assert not phase[number * regions.stride : (number + 1) * regions.stride].any()
    apart = [*regions.empty, *regions.retired, *(r.number for r in regions)]
    assert sorted(apart) == list(range(len(regions.owner))), "each region is empty, retired or cut"
    held = Counter(r.cls.holder for r in regions if r.number not in regions.leaving)
    assert all(regions.held_by(holder) == held[holder] for holder in {*held, *core.index.shares.holders()})
    for number in regions.retired:
        assert not phase[number * regions.stride : (number + 1) * regions.stride].any()
    assert all(r.draining_since_s is not None for r in regions if r.number in regions.leaving)
    assert regions.usable >= min(core.sizing.wanted, len(regions.owner)), "never fewer than wanted"
    assert (regions.slots_used, regions.used_bytes, regions.slots) == (used, used_bytes, slots)
    condemned = np.flatnonzero(phase == Phase.CONDEMNED)
    assert (core.index.slots.pins[condemned] > 0).all(), "a condemned slot that nobody holds was not freed"
