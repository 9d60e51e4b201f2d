# SPDX-License-Identifier: Apache-2.0
"""MemoryArena: the engine's arena in plain memory, true to its port, with a restart."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.engine.ports import RecoveredRegion
from kvpool.model.errors import PoolFull
from kvpool.model.slots import HEADER_ROW, SlotArray

EMPTY, WRITING, READY = 0, 1, 2
PAGE = 4096


class MemoryArena:
    """Bytes, headers and states in arrays. ``reopen`` is what the next server finds after a crash at this moment."""

    def __init__(self, regions: int = 4, region_bytes: int = 16 * PAGE) -> None:
        self.regions = self.usable = regions
        self.idle: set[int] = set()
        """Retired regions: they have no memory."""

        self.region_bytes = region_bytes
        self.stride = region_bytes // PAGE
        self.recovered: Sequence[RecoveredRegion] = ()
        self.outside_writers: set[int] = set()
        """Regions that some other process may write to, as the test says."""

        self.full = False
        """True makes the next region that is cut fail for lack of memory."""

        self.generations = [0] * regions
        self._slot_bytes = [0] * regions
        self._owners: list[str | None] = [None] * regions
        self._bytes = [bytearray() for _ in range(regions)]
        self._rows = np.zeros(regions * self.stride, dtype=HEADER_ROW)
        self._state = np.zeros(regions * self.stride, dtype=np.uint8)
        self._scopes: dict[bytes, tuple[str, str, bytes]] = {}

    def format(self, region: int, slot_bytes: int, owner: str) -> int:
        if self.full:
            raise PoolFull("no memory")
        assert region not in self.idle, "it is retired"
        if self._owners[region] != owner or not self._bytes[region]:
            self.generations[region] += bool(self._bytes[region])
            self._bytes[region] = bytearray(self.region_bytes)
        self._slot_bytes[region], self._owners[region] = slot_bytes, owner
        self._state[region * self.stride : (region + 1) * self.stride] = EMPTY
        return min(self.region_bytes // slot_bytes, self.stride)

    def retire(self, region: int) -> None:
        assert region not in self.idle
        assert not self._state[region * self.stride : (region + 1) * self.stride].any(), "it holds something"
        self.idle.add(region)
        self.generations[region] += bool(self._bytes[region])
        self._bytes[region] = bytearray()
        self._slot_bytes[region], self._owners[region] = 0, None

    def restore(self, region: int) -> None:
        self.idle.remove(region)

    def begin(self, slots: SlotArray, rows: NDArray[np.void]) -> None:
        self._rows[slots] = rows
        self._state[slots] = WRITING

    def commit(
        self, slots: SlotArray, lengths: NDArray[np.uint64], checksums: NDArray[np.void], kinds: NDArray[np.uint8]
    ) -> None:
        self._rows["length"][slots] = lengths
        self._rows["checksum"][slots] = checksums
        self._rows["checksum_kind"][slots] = kinds
        self._state[slots] = READY

    def erase(self, slots: SlotArray) -> None:
        self._state[slots] = EMPTY
        self._rows[slots] = np.zeros(1, dtype=HEADER_ROW)

    def rows(self, slots: SlotArray) -> NDArray[np.void]:
        return self._rows[slots]

    def view(self, slot: int) -> memoryview:
        region, position = divmod(slot, self.stride)
        size = self._slot_bytes[region]
        return memoryview(self._bytes[region])[position * size : (position + 1) * size]

    def read(self, slot: int, offset: int, length: int) -> bytes:
        return bytes(self.view(slot)[offset : offset + length])

    def memories(self, regions: NDArray[np.int64]) -> NDArray[np.uint32]:
        return (regions + np.array(self.generations)[regions] * self.regions).astype(np.uint32)

    def offsets(self, slots: SlotArray) -> NDArray[np.uint64]:
        regions, positions = np.divmod(slots, self.stride)
        offsets: NDArray[np.uint64] = (positions * np.array(self._slot_bytes)[regions]).astype(np.uint64)
        return offsets

    def writers_gone(self, region: int) -> bool:
        return region not in self.outside_writers

    def remember_scope(self, scope: bytes, tenant: str, model: str, namespace: bytes) -> None:
        self._scopes[scope] = (tenant, model, namespace)

    def remembered_scopes(self) -> dict[bytes, tuple[str, str, bytes]]:
        return dict(self._scopes)

    def reopen(self) -> "MemoryArena":
        """Return the arena of the next server on the same memory; the former one must not be used again."""
        after = type(self)(self.regions, self.region_bytes)
        after.outside_writers, after.generations = self.outside_writers, self.generations
        after._slot_bytes, after._owners, after._bytes = self._slot_bytes, self._owners, self._bytes
        after._rows, after._state, after._scopes = self._rows, self._state, self._scopes
        cut = [region for region in range(self.regions) if self._slot_bytes[region]]
        after.recovered = [self._found(region) for region in cut]
        return after

    def _found(self, region: int) -> RecoveredRegion:
        base = region * self.stride
        state = self._state[base : base + self.stride]
        ready, writing = np.flatnonzero(state == READY) + base, np.flatnonzero(state == WRITING) + base
        owner = self._owners[region]
        assert owner is not None
        return RecoveredRegion(
            region, self._slot_bytes[region], owner, ready, self._rows[ready], writing, self._rows[writing]
        )
