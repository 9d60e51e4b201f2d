# SPDX-License-Identifier: Apache-2.0
"""Stores: where chunks go, the bytes of streamed ones, and what is kept."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.engine.clients import Client, Registration
from kvpool.engine.core import Core
from kvpool.engine.counters import EXPIRED_STORES, STORE_BEGUN, STORED_BYTES, STORES
from kvpool.engine.headers import chained_rows, filled_rows
from kvpool.index.leases import StoreLease
from kvpool.index.phases import WRITING
from kvpool.index.tables import KeyTable
from kvpool.model.checksum import CHECKSUM_BYTES, ChecksumKind
from kvpool.model.errors import InvalidRange, Malformed, UnknownLease
from kvpool.model.identity import Mode
from kvpool.model.keys import DIGEST_BYTES
from kvpool.model.slots import PLACEMENT, Disposition, SlotArray

__all__ = ["Kinds", "Stores"]

Frame = bytes | memoryview | NDArray[Any]
Kinds = int | NDArray[np.uint8]
"""How all checksums of a store were made, or a number for each chunk."""

# Plain numbers for NumPy, see phases.
_WRITE, _PENDING, _PRESENT = int(Disposition.WRITE), int(Disposition.PENDING), int(Disposition.PRESENT)
_STORED, _ABANDONED = int(Disposition.STORED), int(Disposition.ABANDONED)

_KNOWN = np.isin(np.arange(256), list(ChecksumKind))
"""For each number whether it is a kind of checksum."""

_LAST_CHUNK = (1 << 31) - 1


class Stores:
    """The verbs prepare_store, begin_write, end_write and commit_store, and all that ends a store."""

    def __init__(self, core: Core) -> None:
        """Work on *core*."""
        self._core = core
        self._lingering: dict[bytes, StoreLease] = {}
        """Streamed stores that are over while copies of theirs still run."""

    def prepare(
        self,
        client: Client,
        store_id: bytes,
        place: tuple[int, int, int],
        parent: bytes,
        digests: bytes | memoryview,
        now_s: float,
    ) -> NDArray[np.void]:
        """Say for each chunk whether and where it is to be written; *place* is (group, shard, first)."""
        registration = client.storer()
        group, shard, first = place
        keys = self._core.keys(digests)
        if not keys or not 0 <= group < len(registration.groups) or shard not in registration.shards:
            raise InvalidRange(f"a store of {len(keys)} chunks to group {group}, shard {shard}: not registered")
        if not 0 <= first <= _LAST_CHUNK - len(keys) or len(parent) not in (0, DIGEST_BYTES):
            raise InvalidRange(f"a store at chunk {first} behind a parent of {len(parent)} bytes")
        key = client.client_id + store_id
        if self._core.stores.get(key) or key in self._lingering:
            raise InvalidRange("this store id is in use")
        self._core.check_lease_room()
        table = self._core.index.scopes.table(registration.scope, group, shard)
        slots, dispositions = self._reserve(client, registration, table, first, parent, keys, now_s)
        length = registration.groups[group].shard_bytes
        streamed = registration.mode is not Mode.CLIENT_MOVED and not client.mover
        lease = StoreLease(
            store_id, client.client_id, client.writer, table, first, now_s, length, slots, dispositions, streamed
        )
        if (slots >= 0).any():
            self._core.stores.add(key, lease, now_s + self._core.config.leases.store_s)
        return self._placements(lease)

    def _reserve(
        self,
        client: Client,
        registration: Registration,
        table: KeyTable,
        first: int,
        parent: bytes,
        keys: list[bytes],
        now_s: float,
    ) -> tuple[SlotArray, NDArray[np.uint8]]:
        """Take slots for the chunks that are not there yet; returns the slots to write and all dispositions."""
        found = table.find(keys)
        writing = self._core.index.slots.phase[found] == WRITING
        dispositions = np.where(writing, _PENDING, _PRESENT).astype(np.uint8)
        missing = np.flatnonzero(found < 0)
        slots = np.full(len(keys), -1, dtype=np.int64)
        if len(missing):
            at = int(missing[0])
            before = int(found[at - 1]) if at else table.slot_of(parent)
            names = keys if len(missing) == len(keys) else [keys[i] for i in missing.tolist()]
            ordinals = missing + first
            taken = self._core.index.reserve(
                table, registration.slot_class(table.group), names, ordinals.astype(np.uint32), before, now_s
            )
            fits = missing[: len(taken)]
            length = registration.groups[table.group].shard_bytes
            rows = filled_rows(table, names[: len(taken)], ordinals[: len(taken)], length, client.writer)
            self._core.arena.begin(taken, chained_rows(rows, keys, fits, parent))
            slots[fits] = taken
            if len(taken) < len(missing):
                dispositions[missing] = int(self._core.index.why_full(table.scope.tenant))
            dispositions[fits] = _WRITE
        return slots, dispositions

    def _placements(self, lease: StoreLease) -> NDArray[np.void]:
        rows = np.zeros(len(lease.slots), dtype=PLACEMENT)
        write = lease.slots >= 0
        held = lease.slots[write]
        rows["slot"] = lease.slots
        rows["disposition"] = lease.dispositions
        rows["memory"][write] = self._core.arena.memories(held // self._core.arena.stride)
        rows["offset"][write] = self._core.arena.offsets(held)
        rows["length"][write] = lease.length
        self._count_answers(lease.dispositions)
        return rows

    def _count_answers(self, dispositions: NDArray[np.uint8]) -> None:
        for disposition, count in enumerate(np.bincount(dispositions).tolist()):
            if count and disposition != Disposition.WRITE:
                self._core.counters.add(STORES[Disposition(disposition)], count)
            elif count:
                self._core.counters.add(STORE_BEGUN, count)

    # Bytes of streamed stores

    def begin_write(self, client: Client, store_id: bytes, chunk: int, offset: int, length: int) -> memoryview:
        """Hand out the bytes that one piece goes to; the copy holds the slot until its end."""
        lease = self._core.stores.get(client.client_id + store_id)
        if lease is None:
            raise UnknownLease("no such store: it ended, ran out, or never was")
        row = chunk - lease.first
        if not lease.streamed or not 0 <= row < len(lease.slots) or lease.slots[row] < 0:
            raise InvalidRange(f"chunk {chunk} of this store is not to be sent")
        begun = lease.begun.get(row, 0)
        if length < 1 or offset != begun or offset + length > lease.length:
            raise InvalidRange(
                f"chunk {chunk}: bytes [{offset}, {offset + length}) of {lease.length}, {begun} came before"
            )
        lease.begun[row] = offset + length
        lease.copying[row] = lease.copying.get(row, 0) + 1
        return self._core.arena.view(int(lease.slots[row]))[offset : offset + length]

    def end_write(self, client_id: bytes, store_id: bytes, chunk: int, length: int, *, ok: bool) -> None:
        """End the copy of one piece, whatever became of its store meanwhile."""
        key = client_id + store_id
        lease = self._core.stores.get(key) or self._lingering.get(key)
        row = chunk - lease.first if lease else -1
        if lease is None or not lease.copying.get(row):
            raise UnknownLease("no copy of this store and chunk is running")
        lease.copying[row] -= 1
        lease.written[row] = lease.written.get(row, 0) + (length if ok else 0)
        if key in self._lingering and not lease.copying[row]:
            self._core.abort(lease.slots[row : row + 1])
            lease.slots[row] = -1
            if not len(lease.held()):
                del self._lingering[key]

    # The end of a store

    def commit(
        self, client: Client, store_id: bytes, complete: Frame, checksums: Frame, kind: Kinds
    ) -> NDArray[np.uint8]:
        """Publish complete chunks and drop the others; see ``Engine.commit_store``."""
        key = client.client_id + store_id
        lease = self._core.stores.get(key)
        if lease is None:
            return self._late(key, complete)
        marks, sums, kinds = _frames(len(lease.slots), complete, checksums, kind)
        self._core.stores.pop(key)
        wanted = (lease.slots >= 0) & (self._core.index.slots.phase[lease.slots] == WRITING)
        stored = np.flatnonzero(wanted & marks & self._arrived(lease))
        self._publish(lease, stored, sums[stored], kinds[stored])
        answer = lease.dispositions.copy()
        answer[lease.slots >= 0] = _ABANDONED
        answer[stored] = _STORED
        lease.slots[stored] = -1
        self._count_ended(lease, len(stored))
        self._abandon(key, lease, over=True)
        return answer

    def lapse(self, key: bytes, *, expired: bool = False) -> None:
        """End a store whose writer has not said that it is over: its chunks are unreadable for ever."""
        lease = self._core.stores.pop(key)
        if lease is not None:
            self._core.counters.add(EXPIRED_STORES, int(expired))
            self._count_ended(lease, 0)
            self._abandon(key, lease, over=False)

    def _publish(
        self, lease: StoreLease, rows: NDArray[np.int64], checksums: NDArray[np.void], kinds: NDArray[np.uint8]
    ) -> None:
        if not len(rows):
            return
        slots = lease.slots[rows]
        lengths = np.full(len(rows), lease.length, dtype=np.uint64)
        self._core.arena.commit(slots, lengths, checksums, kinds)
        self._core.index.publish(slots)
        self._core.waiting.ready(slots)

    def _abandon(self, key: bytes, lease: StoreLease, *, over: bool) -> None:
        """Drop what a store still holds; *over* means that its writer has said that it writes no more."""
        held = lease.held()
        if not len(held):
            return
        if lease.streamed:
            running = np.fromiter((lease.copying.get(i, 0) > 0 for i in range(len(lease.slots))), np.bool_)
            self._core.abort(lease.slots[(lease.slots >= 0) & ~running])
            lease.slots[~running] = -1
            if len(lease.held()):
                self._core.drop(self._written_by(lease))
                self._lingering[key] = lease
        elif over or self._reaped(lease):
            self._core.abort(held)
        else:
            self._core.drop(self._written_by(lease))
            self._core.orphans.add(key, lease.writer, held)

    def _reaped(self, lease: StoreLease) -> bool:
        """True if a mover wrote, which does not exist any more."""
        return lease.writer != lease.client_id and lease.writer not in self._core.movers

    def _written_by(self, lease: StoreLease) -> SlotArray:
        """Return the slots of a store that are still in the index."""
        held = lease.held()
        written: SlotArray = held[self._core.index.slots.phase[held] == WRITING]
        return written

    def _arrived(self, lease: StoreLease) -> NDArray[np.bool_]:
        """Return which chunks are whole as far as the server can know."""
        if not lease.streamed:
            return np.ones(len(lease.slots), dtype=np.bool_)
        whole = (
            lease.written.get(row, 0) == lease.length and not lease.copying.get(row) for row in range(len(lease.slots))
        )
        return np.fromiter(whole, np.bool_, len(lease.slots))

    def _late(self, key: bytes, complete: Frame) -> NDArray[np.uint8]:
        """Take the word of a writer whose lease ran out that it writes no more."""
        slots = self._core.orphans.take(key)
        if not len(slots):
            raise UnknownLease("no such store: it ended, ran out, or never was")
        self._core.abort(slots)
        return np.full(len(complete), Disposition.ABANDONED, dtype=np.uint8)

    def _count_ended(self, lease: StoreLease, stored: int) -> None:
        counters = self._core.counters
        counters.add(STORES[Disposition.STORED], stored)
        counters.add(STORES[Disposition.ABANDONED], len(lease.held()))
        counters.add(STORED_BYTES, stored * lease.length)


def _frames(
    count: int, complete: Frame, checksums: Frame, kind: Kinds
) -> tuple[NDArray[np.bool_], NDArray[np.void], NDArray[np.uint8]]:
    """Read the frames of a commit; no checksums at all are as good as kind NONE."""
    kinds: NDArray[np.uint8] = np.full(count, kind, dtype=np.uint8) if np.ndim(kind) == 0 else np.asarray(kind)
    marks = np.frombuffer(complete, dtype=np.uint8)
    sums = np.frombuffer(checksums, dtype=np.uint8)
    if len(marks) != count or len(sums) not in (count * CHECKSUM_BYTES, 0) or (kinds.any() and not len(sums)):
        raise Malformed(f"{len(marks)} marks and {len(sums)} bytes of checksums for {count} chunks")
    if len(kinds) != count or not _KNOWN[kinds].all():
        raise Malformed(f"checksum kinds {np.unique(kinds).tolist()} are not all known here, or not one a chunk")
    if not len(sums):
        sums = np.zeros(count * CHECKSUM_BYTES, dtype=np.uint8)
    return marks == 1, sums.view(f"V{CHECKSUM_BYTES}"), kinds
