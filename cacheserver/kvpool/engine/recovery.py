# SPDX-License-Identifier: Apache-2.0
"""Taking over what a former server left in the arena. Headers decide; no byte of a chunk is looked at."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.engine.core import Core
from kvpool.engine.outcomes import Recovery
from kvpool.engine.ports import RecoveredRegion
from kvpool.index.quotas import EVERYBODY
from kvpool.index.regions import SlotClass
from kvpool.index.tables import KeyTable
from kvpool.model.slots import SlotArray

__all__ = ["recover"]

_Found = dict[KeyTable, list[tuple[SlotArray, NDArray[np.void]]]]


def recover(core: Core) -> Recovery:
    """Adopt readable slots, one for each key; quarantine those that a former client may still write to."""
    remembered = core.arena.remembered_scopes()
    for digest, (tenant, model, _) in remembered.items():
        core.index.scopes.add(digest, tenant, model)
    found: _Found = {}
    for region in core.arena.recovered:
        _adopt_region(core, region, found)
    chunks = sum(_adopt_table(core, table, parts) for table, parts in found.items())
    quarantined = sum(len(region.writing) for region in core.arena.recovered)
    core.sizing.want(core.arena.usable, core.now_s)
    return Recovery(chunks, quarantined)


def _adopt_region(core: Core, region: RecoveredRegion, found: _Found) -> None:
    """Take over one region with all of its slots held, and sort its readable ones by table."""
    cls = SlotClass(region.slot_bytes, region.owner, _holder(core, region))
    stride = core.arena.stride
    core.index.regions.adopt(region.region, cls, np.concatenate((region.ready, region.writing)) % stride)
    core.index.seize(region.writing)
    for writer in set(region.writing_rows["writer"].tolist()):
        mine = region.writing[region.writing_rows["writer"] == np.void(writer)]
        core.orphans.add(b"recovered" + region.region.to_bytes(4, "little") + writer, writer, mine)
    unknown = []
    for place, at in _by_table(region.ready_rows).items():
        slots, rows = region.ready[at], region.ready_rows[at]
        scope = core.index.scopes.get(place[0])
        if scope is None:
            unknown.append(slots)
        else:
            found.setdefault(core.index.scopes.table(scope, place[1], place[2]), []).append((slots, rows))
    _give_back(core, unknown)


def _holder(core: Core, region: RecoveredRegion) -> str:
    """Return whose share a region is: that of the one tenant whose chunks are in it, else everybody's."""
    found = (core.index.scopes.get(digest) for digest in set(region.ready_rows["scope"].tolist()))
    tenants = {scope.tenant for scope in found if scope is not None}
    return core.index.shares.quotas.holder(tenants.pop()) if len(tenants) == 1 else EVERYBODY


def _by_table(rows: NDArray[np.void]) -> dict[tuple[bytes, int, int], list[int]]:
    """Sort rows by (scope, group, shard)."""
    places: dict[tuple[bytes, int, int], list[int]] = {}
    for at, place in enumerate(
        zip(rows["scope"].tolist(), rows["group"].tolist(), rows["shard"].tolist(), strict=True)
    ):
        places.setdefault(place, []).append(at)
    return places


def _adopt_table(core: Core, table: KeyTable, parts: Sequence[tuple[SlotArray, NDArray[np.void]]]) -> int:
    """Adopt one table's slots at once, so that they are of one recency; of a key that is twice there, one is enough."""
    slots = np.concatenate([part[0] for part in parts])
    rows = np.concatenate([part[1] for part in parts])
    keys: list[bytes] = rows["digest"].tolist()
    last_at = {key: at for at, key in enumerate(keys)}
    kept = np.fromiter(last_at.values(), np.int64, len(last_at))
    core.index.adopt(slots[kept], table, list(last_at), rows["ordinal"][kept])
    _give_back(core, [np.delete(slots, kept)])
    return len(kept)


def _give_back(core: Core, parts: list[SlotArray]) -> None:
    for slots in parts:
        if len(slots):
            core.arena.erase(slots)
            core.index.regions.give(slots)
