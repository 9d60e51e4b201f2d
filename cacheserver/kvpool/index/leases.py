# SPDX-License-Identifier: Apache-2.0
"""Claims of clients: what a lookup pins and what a store may write, each until its deadline."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpool.index.deadlines import Deadlines
from kvpool.index.pins import PinLedger
from kvpool.index.tables import KeyTable, Scope
from kvpool.model.reasons import LookupReason
from kvpool.model.slots import SlotArray

__all__ = ["Holding", "Leases", "LookupLease", "StoreLease"]


@dataclass(slots=True, eq=False)
class Holding:
    """What a lookup holds in one table; row i is chunk i."""

    table: KeyTable
    reach: int
    """Chunks at the end of a prefix that this group needs; as many as were asked for if it needs all."""

    slot_bytes: int
    slots: SlotArray
    """-1 where no slot is known."""

    shares: NDArray[np.int32]
    """Readers that have yet to read the chunk: one pin each. 0 where nothing is pinned."""

    coming: NDArray[np.bool_]
    """Where the slot is being written and wanted as soon as it is ready."""


@dataclass(slots=True, eq=False)
class LookupLease:
    """One lookup. Its pins are the sum of its holdings' shares."""

    lookup_id: bytes
    client_id: bytes
    request_id: str
    scope: Scope
    readers: int
    ledger: PinLedger
    began_s: float
    asked: int
    """Chunks that were asked for."""

    holdings: dict[tuple[int, int], Holding] = field(default_factory=dict)
    """(group, shard) to what is held there."""

    reason: LookupReason = LookupReason.MISSING
    """Why the prefix ends where it does."""

    chunks: int = 0
    """Length of the prefix that is pinned."""

    coming: int = 0
    """Chunks behind it that are still waited for."""

    def unread(self) -> bool:
        """True while a reader has yet to come, or chunks have."""
        return self.coming > 0 or any(h.shares.any() for h in self.holdings.values())


@dataclass(slots=True, eq=False)
class StoreLease:
    """One store of chunks [first, first + n) of one group and shard."""

    store_id: bytes
    client_id: bytes
    writer: bytes
    """Who may write to the slots: the client, or its mover; nobody else if the store is streamed."""

    table: KeyTable
    first: int
    began_s: float
    length: int
    """Bytes of one chunk's piece."""

    slots: SlotArray
    """-1 where nothing is to be written."""

    dispositions: NDArray[np.uint8]
    """What PrepareStore said."""

    streamed: bool
    """True if the server itself writes the bytes: then its own copies are all that can touch the slots."""

    begun: dict[int, int] = field(default_factory=dict)
    """Streamed: row to where the next piece must begin."""

    written: dict[int, int] = field(default_factory=dict)
    """Streamed: row to bytes that are there."""

    copying: dict[int, int] = field(default_factory=dict)
    """Streamed: row to copies that run now."""

    def held(self) -> SlotArray:
        """Return the slots that this store may write."""
        held: SlotArray = self.slots[self.slots >= 0]
        return held


class _Lease(Protocol):
    """What every lease has."""

    client_id: bytes
    began_s: float


L = TypeVar("L", bound=_Lease)


class Leases(Generic[L]):
    """Leases of one kind, by id and by client, each with a deadline."""

    def __init__(self) -> None:
        """Start with none."""
        self._leases: dict[bytes, L] = {}
        self._of_client: dict[bytes, dict[bytes, None]] = {}
        self._deadlines: Deadlines[bytes] = Deadlines()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[L]:
        return iter(self._leases.values())

    def get(self, lease_id: bytes) -> L | None:
        """Return a live lease."""
        return self._leases.get(lease_id)

    def add(self, lease_id: bytes, lease: L, due_s: float) -> None:
        """Keep a new lease until *due_s*."""
        self._leases[lease_id] = lease
        self._of_client.setdefault(lease.client_id, {})[lease_id] = None
        self._deadlines.set(lease_id, due_s)

    def renew(self, lease_id: bytes, due_s: float) -> None:
        """Give a live lease another deadline."""
        self._deadlines.set(lease_id, due_s)

    def pop(self, lease_id: bytes) -> L | None:
        """Remove a lease; it need not be known."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._deadlines.drop(lease_id)
            ids = self._of_client[lease.client_id]
            del ids[lease_id]
            if not ids:
                del self._of_client[lease.client_id]
        return lease

    def of_client(self, client_id: bytes) -> list[bytes]:
        """Return the ids of one client's leases."""
        return list(self._of_client.get(client_id, ()))

    def due(self, now_s: float) -> list[bytes]:
        """Return the ids whose deadline has come; each is named once and is to be popped."""
        return self._deadlines.pop_due(now_s)

    def next_s(self) -> float | None:
        """Return the earliest deadline."""
        return self._deadlines.next_s()

    def oldest_s(self) -> float | None:
        """Return when the oldest live lease began; ids are kept in order of their beginning."""
        return next(iter(self._leases.values())).began_s if self._leases else None
