# SPDX-License-Identifier: Apache-2.0
"""Bringing chunks back from tiers into slots of L1."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.engine.core import Core
from kvpool.engine.counters import FETCH_FAILED, FETCHED
from kvpool.engine.headers import filled_rows
from kvpool.engine.ports import FetchDone, Tier, TierKey
from kvpool.index.leases import Holding
from kvpool.index.phases import WRITING
from kvpool.index.regions import SlotClass
from kvpool.index.tables import KeyTable
from kvpool.model.checksum import CHECKSUM_BYTES
from kvpool.model.slots import SlotArray

__all__ = ["Fetches"]

_NOBODY = bytes(16)


@dataclass(frozen=True, slots=True)
class _Fetch:
    slot: int
    length: int


class Fetches:
    """Fetches under way. A fetch goes on if its lookup ends: the chunk is then simply there."""

    def __init__(self, core: Core, tiers: Sequence[Tier]) -> None:
        """Ask *tiers* in their order; the first that holds a key brings it."""
        self._core = core
        self._tiers = tiers
        self._fetches: dict[int, _Fetch] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._fetches)

    def wanted(self, holdings: list[Holding], keys: list[bytes]) -> list[NDArray[np.bool_]]:
        """Return for each table which of the chunks without a slot a tier seems to hold."""
        masks = [np.zeros(len(keys), dtype=np.bool_) for _ in holdings]
        for tier in self._tiers:
            for holding, mask in zip(holdings, masks, strict=True):
                rows = np.flatnonzero((holding.slots < 0) & ~mask)
                mask[rows] = tier.holds([_tier_key(holding.table, keys[row]) for row in rows.tolist()])
        return masks

    def start(self, holding: Holding, rows: NDArray[np.int64], keys: list[bytes], now_s: float) -> None:
        """Begin to bring chunks; writes their slots into *holding*, for as many as there is room."""
        if not len(rows):
            return
        names = [keys[row] for row in rows.tolist()]
        table = holding.table
        length = table.scope.groups[table.group].shard_bytes
        cls = SlotClass(holding.slot_bytes, table.scope.home)
        before = int(holding.slots[rows[0] - 1]) if rows[0] else -1
        slots = self._core.index.reserve(table, cls, names, rows.astype(np.uint32), before, now_s)
        headers = filled_rows(table, names[: len(slots)], rows[: len(slots)], length, _NOBODY)
        self._core.arena.begin(slots, headers)
        holding.slots[rows[: len(slots)]] = slots
        for name, slot in zip(names, slots.tolist(), strict=False):
            self._fetch(_tier_key(table, name), slot, length)

    def collect(self) -> None:
        """Take in what the tiers have finished."""
        for tier in self._tiers:
            for done in tier.done():
                self._finish(done, self._fetches.pop(done.fetch_id))

    def _fetch(self, key: TierKey, slot: int, length: int) -> None:
        tier = next((t for t in self._tiers[:-1] if t.holds([key])[0]), self._tiers[-1])
        self._last += 1
        self._fetches[self._last] = _Fetch(slot, length)
        tier.fetch(self._last, key, self._core.arena.view(slot)[:length])

    def _finish(self, done: FetchDone, fetch: _Fetch) -> None:
        slots: SlotArray = np.array([fetch.slot])
        good = done.length == fetch.length
        self._core.counters.add(FETCHED if good else FETCH_FAILED)
        if not good or self._core.index.slots.phase[fetch.slot] != WRITING:
            self._core.abort(slots)
            return
        checksums = np.frombuffer(done.checksum, dtype=f"V{CHECKSUM_BYTES}")
        kinds = np.array([done.checksum_kind], dtype=np.uint8)
        self._core.arena.commit(slots, np.array([fetch.length], dtype=np.uint64), checksums, kinds)
        self._core.index.publish(slots)
        self._core.waiting.ready(slots)


def _tier_key(table: KeyTable, digest: bytes) -> TierKey:
    return TierKey(table.scope.digest, digest, table.group, table.shard)
