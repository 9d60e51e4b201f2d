# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002 - one signature for all handlers
"""Just enough of a server's memory for a client's tests: chunks in one memfd, no eviction, no limits."""

import mmap
import os
from dataclasses import dataclass, field

import numpy as np

from kvpool.model.checksum import CHECKSUM_BYTES, ChecksumKind, checksum
from kvpool.model.errors import NotRegistered, UnknownLease
from kvpool.model.identity import Mode
from kvpool.model.keys import digest_list
from kvpool.model.slots import PLACEMENT, Disposition
from kvpool.wire import messages as m
from kvpool.wire.codec import checksums_of, flags_of

REGION_BYTES = 32 << 20


@dataclass
class Slot:
    offset: int
    length: int
    checksum: bytes = bytes(CHECKSUM_BYTES)
    kind: int = 0


@dataclass
class Client:
    client_id: bytes
    registration: m.Register | None = None
    mode: Mode | None = None
    stores: dict = field(default_factory=dict)
    lookups: dict = field(default_factory=dict)


class TinyEngine:
    def __init__(self, *, modes=(Mode.CLIENT_MOVED, Mode.STREAMED), verify=True):
        self.memfd = os.memfd_create("tiny")
        os.ftruncate(self.memfd, REGION_BYTES)
        self.memory = memoryview(mmap.mmap(self.memfd, REGION_BYTES))
        self.modes = modes
        self.verify = verify
        self.used = 0
        self.slots: dict[tuple, Slot] = {}
        self.clients: dict[bytes, Client] = {}
        self.lookups: dict[bytes, tuple] = {}

    def hello(self, client_id):
        self.gone(client_id)
        self.clients[client_id] = Client(client_id)

    def gone(self, client_id):
        client = self.clients.pop(client_id, None)
        for lookup_id in client.lookups if client else ():
            self.lookups.pop(lookup_id, None)

    def answer(self, client_id, request, frames):
        client = self.clients.get(client_id)
        if client is None:
            raise NotRegistered("say Hello first")
        return getattr(self, f"_{type(request).__name__.lower()}")(client, request, frames)

    def _register(self, client, request, frames):
        client.registration = request
        client.mode = next((mode for mode in request.modes if mode in self.modes), Mode.STREAMED)
        return m.Registered(mode=client.mode, reason="tiny"), []

    def _unregister(self, client, request, frames):
        self.gone(client.client_id)
        return m.Unregistered(known=True), []

    def _ping(self, client, request, frames):
        return m.Pong(), []

    def _renew(self, client, request, frames):
        return m.Renewed(identity_expires_s=None), []

    def _lookup(self, client, request, frames):
        digests = digest_list(frames[0])
        groups = range(len(client.registration.groups))
        found = 0
        for digest in digests:
            if not all((g, s, digest) in self.slots for g in groups for s in request.shards):
                break
            found += 1
        self.lookups[request.lookup_id] = (client.client_id, request.request_id, digests[:found])
        client.lookups[request.lookup_id] = True
        return m.Found(chunks=found, reason="all" if found == len(digests) else "missing"), []

    def _lookupstatus(self, client, request, frames):
        return m.Found(chunks=len(self._lookup_of(request)), reason="all"), []

    def _freelookup(self, client, request, frames):
        return m.Freed(chunks=0), []

    def _endrequest(self, client, request, frames):
        ended = [k for k, v in self.lookups.items() if v[:2] == (client.client_id, request.request_id)]
        for lookup_id in ended:
            del self.lookups[lookup_id]
        return m.Ended(leases=len(ended)), []

    def _preparestore(self, client, request, frames):
        digests = digest_list(frames[0])
        length = client.registration.groups[request.group].shard_bytes
        rows = np.zeros(len(digests), dtype=PLACEMENT)
        for row, digest in zip(rows, digests, strict=True):
            if (request.group, request.shard, digest) in self.slots:
                row["disposition"] = Disposition.PRESENT
                continue
            row["disposition"], row["offset"], row["length"] = Disposition.WRITE, self.used, length
            self.used += -(-length // 4096) * 4096
        client.stores[request.store_id] = (request, digests, rows)
        return m.Prepared(write=int((rows["disposition"] == Disposition.WRITE).sum())), [rows.tobytes()]

    def _writechunk(self, client, request, frames):
        prepared, _, rows = self._store_of(client, request)
        begin = int(rows[request.chunk - prepared.first]["offset"]) + request.offset
        self.memory[begin : begin + len(frames[0])] = bytes(frames[0])
        return m.Wrote(), []

    def _commitstore(self, client, request, frames):
        prepared, digests, rows = self._store_of(client, request)
        del client.stores[request.store_id]
        complete, sums = flags_of(frames[0], len(digests)), checksums_of(frames[1], len(digests))
        out = rows["disposition"].astype(np.uint8)
        for i, digest in enumerate(digests):
            if rows[i]["disposition"] == Disposition.WRITE:
                out[i] = Disposition.STORED if complete[i] else Disposition.ABANDONED
            if out[i] == Disposition.STORED:
                slot = Slot(int(rows[i]["offset"]), int(rows[i]["length"]), sums[i].tobytes(), request.checksum_kind)
                self.slots[prepared.group, prepared.shard, digest] = slot
        return m.Stored(stored=int((out == Disposition.STORED).sum())), [out.tobytes()]

    def _prepareretrieve(self, client, request, frames):
        slots = [self.slots[k] for k in self._keys(request)]
        rows = np.zeros(len(slots), dtype=PLACEMENT)
        rows["disposition"] = Disposition.IN_PLACE if client.mode is Mode.CLIENT_MOVED else Disposition.STREAM
        rows["offset"], rows["length"] = [s.offset for s in slots], [s.length for s in slots]
        sums = b"".join(s.checksum for s in slots)
        kinds = bytes(s.kind if self.verify else 0 for s in slots)
        return m.Readable(chunks=len(slots)), [rows.tobytes(), sums, kinds]

    def _readchunk(self, client, request, frames):
        digest = self._lookup_of(request)[request.chunk]
        slot = self.slots[request.group, request.shard, digest]
        begin = slot.offset + request.offset
        return m.Bytes(), [bytes(self.memory[begin : begin + request.length])]

    def _commitretrieve(self, client, request, frames):
        bad = flags_of(frames[0], request.end - request.first)
        out = np.full(len(bad), Disposition.VOUCHED, np.uint8)
        for i, key in enumerate(self._keys(request)):
            if bad[i]:
                out[i] = Disposition.LOST
                self.slots.pop(key, None)
        return m.Retrieved(vouched=int((out == Disposition.VOUCHED).sum())), [out.tobytes()]

    def _keys(self, request):
        digests = self._lookup_of(request)
        return [(request.group, request.shard, d) for d in digests[request.first : request.end]]

    def _lookup_of(self, request):
        if request.lookup_id not in self.lookups:
            raise UnknownLease("no such lookup")
        return self.lookups[request.lookup_id][2]

    def _store_of(self, client, request):
        if request.store_id not in client.stores:
            raise UnknownLease("no such store")
        return client.stores[request.store_id]

    def put(self, digest, data, *, group=0, shard=0, wrong=False):
        """Keep *data* as if somebody had stored it; *wrong*: under a checksum of other bytes."""
        self.memory[self.used : self.used + len(data)] = data
        sum_ = checksum(b"other" if wrong else data, ChecksumKind.BLAKE3)
        self.slots[group, shard, digest] = Slot(self.used, len(data), sum_, ChecksumKind.BLAKE3)
        self.used += -(-len(data) // 4096) * 4096
