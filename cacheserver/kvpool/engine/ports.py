# SPDX-License-Identifier: Apache-2.0
"""What the engine needs from the rim. tests/contract runs one suite over every implementation, real and fake.

All calls come from the one thread that owns the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.model.slots import RecoveredRegion, SlotArray

__all__ = ["Arena", "FetchDone", "RecoveredRegion", "Tier", "TierKey"]


class Arena(Protocol):
    """The memory. A slot's number is ``region * stride + position``.

    The arena owes: a crash between any two stores to memory leaves each slot's header as it was before, as it is after,
    or empty, never mixed. The engine grants: it never begins a slot that anything may still write to.
    """

    regions: int
    """All that there may ever be."""

    usable: int
    """Regions to be used at first."""

    region_bytes: int
    stride: int
    recovered: Sequence[RecoveredRegion]

    def format(self, region: int, slot_bytes: int, owner: str) -> int:
        """Cut an empty region into slots, ``min(region_bytes // slot_bytes, stride)`` of them; returns how many.

        Erases all its headers first. For another owner than before the region gets new memory: nothing that somebody
        has mapped reaches it, and no former byte is in it.

        Raises:
            PoolFull: there is no memory; the region stays empty.
        """

    def retire(self, region: int) -> None:
        """Give a region's memory back; it holds nothing, and is not cut again before ``restore``.

        As for another owner, it has new memory afterwards.
        """

    def restore(self, region: int) -> None:
        """Let a retired region be cut again."""

    def begin(self, slots: SlotArray, rows: NDArray[np.void]) -> None:
        """Mark *slots* as being written and put *rows* into their headers."""

    def commit(
        self, slots: SlotArray, lengths: NDArray[np.uint64], checksums: NDArray[np.void], kinds: NDArray[np.uint8]
    ) -> None:
        """Mark *slots* as complete; a server that starts after a crash will serve them."""

    def erase(self, slots: SlotArray) -> None:
        """Make the headers of *slots* empty."""

    def rows(self, slots: SlotArray) -> NDArray[np.void]:
        """Return a copy of the header rows of *slots*."""

    def view(self, slot: int) -> memoryview:
        """Return the writable bytes of one slot, all of them."""

    def read(self, slot: int, offset: int, length: int) -> bytes:
        """Return a copy of part of one slot; shorter if the memory is gone, because a client cut it. Any thread."""

    def offsets(self, slots: SlotArray) -> NDArray[np.uint64]:
        """Return where *slots* begin, each in its own region."""

    def memories(self, regions: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the numbers by which clients ask for the memory behind regions.

        A region whose memory is replaced gets a number never used before, so that no client takes an old mapping for
        the new memory.
        """

    def writers_gone(self, region: int) -> bool:
        """Return True if it is proven that no process but this one can write to the region."""

    def remember_scope(self, scope: bytes, tenant: str, model: str, namespace: bytes) -> None:
        """Keep the names behind a scope digest, so that they are known after a restart."""

    def remembered_scopes(self) -> dict[bytes, tuple[str, str, bytes]]:
        """Return all (tenant, model, namespace) kept by ``remember_scope``."""


@dataclass(frozen=True, slots=True)
class TierKey:
    """One shard of one chunk, as a tier names it."""

    scope: bytes
    digest: bytes
    group: int
    shard: int


@dataclass(frozen=True, slots=True)
class FetchDone:
    """The end of one fetch; every fetch ends exactly once."""

    fetch_id: int
    length: int
    """Bytes brought; 0 if the key is not there, did not verify, or the fetch failed."""

    checksum: bytes
    checksum_kind: int


class Tier(Protocol):
    """A lower level that chunks come back from. No call blocks."""

    def holds(self, keys: Sequence[TierKey]) -> list[bool]:
        """Say which keys are probably here, from memory alone; a wrong yes costs a miss later."""

    def fetch(self, fetch_id: int, key: TierKey, target: memoryview) -> None:
        """Start bringing one key's bytes into *target*, which stays valid until the fetch is done."""

    def done(self) -> list[FetchDone]:
        """Return the fetches that ended since the last call."""

    def on_done(self, wake: Callable[[], None]) -> None:
        """Call *wake* (from any thread) whenever ``done`` has something new."""
