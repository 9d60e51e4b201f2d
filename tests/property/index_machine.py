# SPDX-License-Identifier: Apache-2.0
"""Random operations through the engine against a simple model of what may be read.

    python -m tests.property.index_machine --ops 1000000 --seed 7

Every byte in the arena carries the identity of the chunk and of the write that put it there. Clients die, stall, come
back and go on writing after their leases ran out; the server crashes and is started again on the same memory. What a
retrieve vouches for must be, byte by byte, a complete write of exactly that chunk.
"""

import argparse
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, config, digests, fresh_id, namespace
from tests.fakes.tier import FakeTier
from tests.property.engine_checks import check

from kvpool.config import L1Config, LeaseConfig, LimitConfig
from kvpool.engine.engine import Engine
from kvpool.engine.outcomes import Access
from kvpool.engine.ports import TierKey
from kvpool.model.errors import CacheError, NotRegistered, PoolFull, UnknownLease
from kvpool.model.identity import GroupKind, GroupSpec, Mode
from kvpool.model.keys import scope_digest
from kvpool.model.slots import SERVER_OWNED, Disposition

UNIT = struct.Struct("<QQIIQ")  # scope, digest number, group, shard, write
Key = tuple[int, int, int, int]

CHAINS = 3
"""Token sequences that share nothing, in each space."""

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE
SPACES = (
    ("a", namespace("m0"), (GroupSpec(kind=FULL, shard_bytes=PAGE),)),
    ("b", namespace("m0"), (GroupSpec(kind=FULL, shard_bytes=PAGE - 64),)),
    ("a", namespace("m1", 2), (GroupSpec(kind=FULL, shard_bytes=2 * PAGE),)),
    (
        "a",
        namespace("m2"),
        (GroupSpec(kind=FULL, shard_bytes=PAGE), GroupSpec(kind=WINDOW, shard_bytes=PAGE, window_tokens=40)),
    ),
    ("b", namespace("m3"), (GroupSpec(kind=FULL, shard_bytes=PAGE), GroupSpec(kind=STATE, shard_bytes=3 * PAGE))),
)


def payload(key: Key, write: int, length: int) -> bytes:
    unit = UNIT.pack(*key, write)
    return (unit * (length // len(unit) + 1))[:length]


@dataclass(eq=False)
class OpenStore:
    """A store as its client sees it: until it has confirmed the end, it may write at any time."""

    store_id: bytes
    space: int
    group: int
    shard: int
    numbers: list[int]
    rows: NDArray[np.void]
    write: int
    sent: dict[int, int] = field(default_factory=dict)
    copies: list[tuple[int, int, memoryview]] = field(default_factory=list)


@dataclass(eq=False)
class OpenLookup:
    lookup_id: bytes
    space: int
    request_id: str
    numbers: list[int]
    chunks: int


@dataclass(eq=False)
class Proc:
    """One client process."""

    client: FakeClient
    space: int
    connected: bool = True
    stores: list[OpenStore] = field(default_factory=list)
    lookups: list[OpenLookup] = field(default_factory=list)
    reads: list[tuple[tuple[bytes, int, int, int], Callable[[], bytes], Key, int]] = field(default_factory=list)
    mapped: set[int] = field(default_factory=set)

    @property
    def moves(self) -> bool:
        return self.client.mode is Mode.CLIENT_MOVED


class WatchedArena(MemoryArena):
    """Tells the truth about processes that can still write to a region."""

    procs: list[Proc]

    def writers_gone(self, region: int) -> bool:
        return not any(region in proc.mapped for proc in self.procs)


class Machine:
    """The engine, its clients, and what is known about every chunk."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.writes = 0
        self.procs: list[Proc] = []
        self.unproven: list[bytes] = []
        """Clients whose death the server has not been told of."""
        self.complete: dict[Key, set[int]] = {}
        """Writes of each chunk that were complete when they became readable."""
        self.sure: set[Key] = set()
        """Chunks that cannot have gone since."""
        self.seen_evicted = 0
        self.counts: Counter[str] = Counter()
        self.tier = FakeTier()
        self.arena = WatchedArena(regions=12, region_bytes=12 * PAGE)
        self.arena.procs = self.procs
        self.engine = self._engine()
        self.ops = [getattr(self, name) for name in WEIGHTS for _ in range(WEIGHTS[name])]

    def run(self, ops: int, check_every: int = 50) -> None:
        for done in range(ops):
            op = self.random.choice(self.ops)
            self.counts[op.__name__] += 1
            op()
            self._watch_evictions()
            if done % check_every == 0:
                check(self.engine)
        self.quiesce()

    def _engine(self) -> Engine:
        settings = config(
            l1=L1Config(evict_above=0.95, evict_to=0.8, verify_loads=0.3),
            leases=LeaseConfig(lookup_s=10, store_s=10, tombstone_s=5, session_idle_s=30),
            limits=LimitConfig(pinned_share=1.0, pinned_client_share=1.0, sessions=200, leases=200),
        )
        return Engine(settings, self.arena, [self.tier])

    # Picking

    def _proc(self, *, connected: bool = True) -> Proc | None:
        able = [p for p in self.procs if p.connected is connected]
        return self.random.choice(able) if able else None

    def _numbers(self) -> list[int]:
        return list(range(self.random.randint(1, 7)))

    def _digests(self, numbers: list[int], chain: int) -> bytes:
        return digests(*numbers, chain=chain)

    # Clients

    def op_join(self) -> None:
        if len(self.procs) >= 7:
            return
        space = self.random.randrange(len(SPACES))
        tenant, names, groups = SPACES[space]
        client = FakeClient(
            self.engine,
            self.arena,
            self.random.choice((Mode.CLIENT_MOVED, Mode.STREAMED)),
            tenant,
            space=names,
            groups=groups,
            shards=tuple(range(names.shard_count)),
            readers=self.random.choice((1, 1, 2)),
        )
        self.procs.append(Proc(client.join(self.now_s), space))

    def op_lose(self) -> None:
        """The connection breaks; the process lives, and goes on writing."""
        if proc := self._proc():
            self.engine.client_lost(proc.client.client_id, self.now_s, proven_dead=False)
            proc.connected = False
            proc.lookups.clear()

    def op_come_back(self) -> None:
        """A lost client stops its copies and says Hello again."""
        if proc := self._proc(connected=False):
            proc.stores = [s for s in proc.stores if s.copies]
            proc.client.engine = self.engine
            proc.client.join(self.now_s)
            proc.connected = True

    def op_die(self) -> None:
        """The process is killed; the server learns it now or later."""
        if proc := self._proc(connected=self.random.random() < 0.5):
            self.procs.remove(proc)
            self._end_copies(proc)
            client_id = proc.client.client_id
            how = self.random.random()
            if how < 0.4:
                self.engine.client_lost(client_id, self.now_s, proven_dead=True)
            else:
                self.engine.client_lost(client_id, self.now_s, proven_dead=False)
                if how < 0.8:
                    self.engine.writers_proven_dead(client_id, self.now_s)
                else:
                    self.unproven.append(client_id)

    def op_unregister(self) -> None:
        if proc := self._proc():
            self.procs.remove(proc)
            self._end_copies(proc)
            assert self.engine.unregister(proc.client.client_id, self.now_s)

    def _end_copies(self, proc: Proc) -> None:
        """The server's own copies outlive a client; they are ended here, after it went or before."""
        for store in proc.stores:
            for row, length, _ in store.copies:
                self._end_write(proc, store, row, length, ok=False)
            store.copies.clear()
        for piece, *_ in proc.reads:
            self.engine.end_read(proc.client.client_id, *piece, 0, 1, self.now_s)
        proc.reads.clear()

    # Stores

    def op_prepare_store(self) -> None:
        proc = self._proc()
        if proc is None or len(proc.stores) > 4:
            return
        _, names, groups = SPACES[proc.space]
        group, shard = self.random.randrange(len(groups)), self.random.randrange(names.shard_count)
        chain, numbers = self.random.randrange(CHAINS), self._numbers()
        first = self.random.randrange(len(numbers))
        mine = [chain * 100 + n for n in numbers[first:]]
        try:
            store_id, rows = proc.client.prepare(self._digests(numbers[first:], chain), first, group, shard, self.now_s)
        except PoolFull:
            return
        self.counts.update(f"answer {Disposition(d).name}" for d in rows["disposition"].tolist())
        write = rows["disposition"] == Disposition.WRITE
        if write.any():
            self.writes += 1
            proc.stores.append(OpenStore(store_id, proc.space, group, shard, mine, rows, self.writes))
            for region in set((rows["slot"][write] // self.arena.stride).tolist()) if proc.moves else ():
                assert self.engine.region_access(proc.client.client_id, region) is Access.WRITE
                proc.mapped.add(region)

    def op_store_all(self) -> None:
        """An undisturbed store of one sequence, with all of its groups and shards."""
        if not (proc := self._proc()) or not proc.moves:
            return
        _, names, groups = SPACES[proc.space]
        chain, numbers = self.random.randrange(CHAINS), self._numbers()
        for group in range(len(groups)):
            for shard in range(names.shard_count):
                keys = self._digests(numbers, chain)
                store_id, rows = proc.client.prepare(keys, 0, group, shard, self.now_s)
                if not (rows["disposition"] == Disposition.WRITE).any():
                    continue
                self.writes += 1
                mine = [chain * 100 + n for n in numbers]
                store = OpenStore(store_id, proc.space, group, shard, mine, rows, self.writes)
                for row in np.flatnonzero(rows["disposition"] == Disposition.WRITE).tolist():
                    length = int(rows["length"][row])
                    data = payload(self._key(store, row), store.write, length)
                    self.arena.view(int(rows["slot"][row]))[:length] = data
                    store.sent[row] = length
                marks = np.ones(len(rows), dtype=np.uint8)
                answer = self.engine.commit_store(proc.client.client_id, store_id, marks, b"", 0, self.now_s)
                for row in np.flatnonzero(answer == Disposition.STORED).tolist():
                    self._stored(store, row)

    def op_write(self) -> None:
        """A client puts bytes where it was told to, however late that is."""
        proc = self.random.choice(self.procs) if self.procs else None
        if proc and proc.stores and proc.moves:
            store = self.random.choice(proc.stores)
            for row in np.flatnonzero(store.rows["disposition"] == Disposition.WRITE).tolist():
                if self.random.random() < 0.8:
                    self._put(store, row, int(store.rows["length"][row]))

    def _put(self, store: OpenStore, row: int, length: int) -> None:
        data = payload(self._key(store, row), store.write, int(store.rows["length"][row]))
        half = self.random.choice((length, length, length // 2))
        self.arena.view(int(store.rows["slot"][row]))[:half] = data[:half]
        store.sent[row] = max(store.sent.get(row, 0), half)

    def op_begin_write(self) -> None:
        proc = self._proc()
        if not proc or not proc.stores or proc.moves:
            return
        store = self.random.choice(proc.stores)
        row = self.random.choice(np.flatnonzero(store.rows["disposition"] == Disposition.WRITE).tolist())
        begun = store.sent.get(row, 0)
        length = int(store.rows["length"][row])
        piece = min(length - begun, self.random.choice((1000, length, length)))
        if piece:
            try:
                target = self.engine.begin_write(
                    proc.client.client_id, store.store_id, row + self._first(store), begun, piece
                )
            except UnknownLease:
                return
            # The lane copies at some time before the end; here in two steps, at its start and at its end.
            target[: piece // 2] = payload(self._key(store, row), store.write, length)[begun : begun + piece // 2]
            store.sent[row] = begun + piece
            store.copies.append((row, piece, target))

    def op_end_write(self) -> None:
        proc = self.random.choice(self.procs) if self.procs else None
        busy = [s for s in proc.stores if s.copies] if proc else []
        if proc and busy:
            store = self.random.choice(busy)
            row, piece, target = store.copies.pop(0)
            data = payload(self._key(store, row), store.write, int(store.rows["length"][row]))
            end = sum(p for r, p in self._done(store) if r == row) + piece
            target[:] = data[end - piece : end]
            self._end_write(proc, store, row, piece, ok=self.random.random() < 0.95)

    def _done(self, store: OpenStore) -> list[tuple[int, int]]:
        done: list[tuple[int, int]] = store.__dict__.setdefault("done", [])
        return done

    def _end_write(self, proc: Proc, store: OpenStore, row: int, length: int, *, ok: bool) -> None:
        self._done(store).append((row, length))
        if not ok:
            store.__dict__.setdefault("torn", set()).add(row)
        self.engine.end_write(
            proc.client.client_id, store.store_id, row + self._first(store), length, self.now_s, ok=ok
        )

    def op_commit_store(self) -> None:
        proc = self.random.choice(self.procs) if self.procs else None
        if not proc or not proc.stores:
            return
        store = self.random.choice(proc.stores)
        whole = [store.sent.get(row, 0) == int(store.rows["length"][row]) for row in range(len(store.rows))]
        marks = np.array(whole if proc.moves else [1] * len(whole), dtype=np.uint8)
        try:
            answer = self.engine.commit_store(proc.client.client_id, store.store_id, marks, b"", 0, self.now_s)
        except UnknownLease:
            proc.stores = [s for s in proc.stores if s is not store or s.copies]
            return
        except NotRegistered:
            return  # cut off: it has confirmed nothing
        proc.stores = [s for s in proc.stores if s is not store or s.copies]
        for row in np.flatnonzero(answer == Disposition.STORED).tolist():
            self._stored(store, row)

    def _stored(self, store: OpenStore, row: int) -> None:
        assert store.sent[row] == store.rows["length"][row], "a chunk was kept whose bytes never all came"
        assert row not in store.__dict__.get("torn", ()), "a chunk was kept although a copy of it failed"
        key = self._key(store, row)
        self.complete.setdefault(key, set()).add(store.write)
        self.sure.add(key)
        if self.random.random() < 0.3:
            data = payload(key, store.write, int(store.rows["length"][row]))
            self.tier.kept[self._tier_key(key)] = data

    def _first(self, store: OpenStore) -> int:
        return store.numbers[0] % 100

    def _key(self, store: OpenStore, row: int) -> Key:
        return (store.space, store.numbers[row], store.group, store.shard)

    def _tier_key(self, key: Key) -> TierKey:
        space, number, group, shard = key
        tenant, names, _ = SPACES[space]
        return TierKey(scope_digest(tenant, names), digests(number % 100, chain=number // 100), group, shard)

    # Lookups and loads

    def op_lookup(self) -> None:
        proc = self._proc()
        if proc is None:
            return
        chain, numbers = self.random.randrange(CHAINS), self._numbers()
        request = f"r{self.random.randrange(6)}"
        known = [chain * 100 + n for n in numbers]
        sure = self._sure_prefix(proc, known)
        try:
            lookup_id, found = proc.client.lookup(self._digests(numbers, chain), request, now_s=self.now_s)
        except CacheError as e:
            self.counts[f"lookup {e.code}"] += 1
            return
        self.counts[f"lookup {found.reason}"] += 1
        self._watch_evictions()
        if found.reason != "ended":
            assert found.chunks >= min(sure, len(numbers)) or not self.sure, f"lost: {found} of {sure} sure chunks"
        for group, spec in enumerate(SPACES[proc.space][2]):
            for number in self._needed(known[: found.chunks], spec):
                for shard in range(SPACES[proc.space][1].shard_count):
                    assert (proc.space, number, group, shard) in self.complete, "found what nobody stored"
        proc.lookups.append(OpenLookup(lookup_id, proc.space, request, known, found.chunks))
        del proc.lookups[:-6]

    def _needed(self, known: list[int], spec: GroupSpec) -> list[int]:
        if spec.kind is WINDOW:
            return known[-3:]
        return known[-1:] if spec.kind is STATE else known

    def _sure_prefix(self, proc: Proc, known: list[int]) -> int:
        """Return how many chunks must be found: all pieces of them are sure to be there."""
        _, names, groups = SPACES[proc.space]
        length = 0
        for number in known:
            pieces = ((proc.space, number, g, s) for g in range(len(groups)) for s in range(names.shard_count))
            if not all(piece in self.sure for piece in pieces):
                break
            length += 1
        return length

    def op_status(self) -> None:
        if (proc := self._proc()) and proc.lookups:
            lookup = self.random.choice(proc.lookups)
            try:
                found = self.engine.lookup_status(proc.client.client_id, lookup.lookup_id, self.now_s)
            except UnknownLease:
                return
            assert found.chunks >= lookup.chunks, "a pinned prefix shrank"
            lookup.chunks = found.chunks
            self.engine.take_resolved()

    def op_load(self) -> None:
        """Read where the server says, with other things happening in between, and ask whether it may be used."""
        if not (proc := self._proc()) or not proc.lookups:
            return
        lookup = self.random.choice([k for k in proc.lookups if k.chunks] or proc.lookups)
        if not lookup.chunks:
            return
        _, names, groups = SPACES[proc.space]
        group, shard = self.random.randrange(len(groups)), self.random.randrange(names.shard_count)
        first = self.random.randrange(lookup.chunks)
        end = self.random.randint(first + 1, lookup.chunks)
        try:
            plan = proc.client.read(lookup.lookup_id, first, end, group, shard, self.now_s)
        except UnknownLease:
            return
        for _ in range(self.random.choice((0, 0, 1, 3))):
            if op := self.random.choice(SHORT):
                getattr(self, op)()
        read = [
            bytes(self.arena.view(int(row["slot"]))[: int(row["length"])]) if row["slot"] >= 0 else b""
            for row in plan.placements
        ]
        bad = [int(self.random.random() < 0.02) for _ in read]
        if proc not in self.procs or not proc.connected:
            return
        answer = proc.client.vouch(lookup.lookup_id, first, end, group, shard, bad, self.now_s)
        for at, (verdict, data, wrong) in enumerate(zip(answer, read, bad, strict=True)):
            key = (proc.space, lookup.numbers[first + at], group, shard)
            if wrong:
                assert verdict == Disposition.LOST
                self.sure.discard(key)
            elif verdict == Disposition.VOUCHED:
                self._verify(key, data)
            self.counts[f"load {Disposition(verdict).name}"] += 1

    def _verify(self, key: Key, data: bytes) -> None:
        found = UNIT.unpack(data[: UNIT.size])
        assert found[:4] == key, f"bytes of {found[:4]} were vouched for as {key}"
        assert found[4] in self.complete[key], "bytes of a write that was never complete"
        assert data == payload(key, found[4], len(data)), "torn bytes"
        self.counts["chunks verified"] += 1

    def op_begin_read(self) -> None:
        proc = self._proc()
        if not proc or not proc.lookups or proc.moves or len(proc.reads) > 3:
            return
        lookup = self.random.choice(proc.lookups)
        if lookup.chunks:
            chunk = self.random.randrange(lookup.chunks)
            piece = (lookup.lookup_id, 0, 0, chunk)
            length = SPACES[proc.space][2][0].shard_bytes
            try:
                read = self.engine.begin_read(proc.client.client_id, *piece, 0, length, self.now_s)
            except UnknownLease:
                return
            write = UNIT.unpack(read()[: UNIT.size])[4]
            proc.reads.append((piece, read, (proc.space, lookup.numbers[chunk], 0, 0), write))

    def op_end_read(self) -> None:
        """A running copy out of a slot sees the same write from its start to its end, whatever ended meanwhile."""
        if (proc := self._proc()) and proc.reads:
            piece, read, key, write = proc.reads.pop(0)
            data = read()
            assert data == payload(key, write, len(data)), "a slot changed under a running copy"
            self.counts["copies verified"] += 1
            self.engine.end_read(proc.client.client_id, *piece, 0, len(data), self.now_s)

    def op_free(self) -> None:
        if (proc := self._proc()) and proc.lookups:
            lookup = self.random.choice(proc.lookups)
            first = self.random.randint(0, 4)
            end = self.random.choice((first, first + 2, 1 << 31))
            self.engine.free_lookup(proc.client.client_id, lookup.lookup_id, first, end, self.now_s)

    def op_end_request(self) -> None:
        if proc := self._proc():
            self.engine.end_request(proc.client.client_id, f"r{self.random.randrange(6)}", self.now_s)

    def op_early_free(self) -> None:
        """The end of a lookup overtakes it."""
        if proc := self._proc():
            lookup_id = fresh_id()
            self.engine.free_lookup(proc.client.client_id, lookup_id, 0, 1 << 31, self.now_s)
            _, found = proc.client.lookup(digests(0, 1), "early", lookup_id, now_s=self.now_s)
            assert found.chunks == 0

    # The server

    def op_tick(self) -> None:
        self.now_s += self.random.choice((0.01, 0.1, 0.1, 0.5, 0.5, 1.0, 1.0, 4.0))
        self.engine.tick(self.now_s)

    def op_tier(self) -> None:
        self.tier.failing = {key for key in self.tier.kept if self.random.random() < 0.2}
        if self.random.random() < 0.1:
            self.tier.kept.clear()
        self.tier.finish(self.random.choice((None, 1, 2)))

    def op_clear(self) -> None:
        tenant = self.random.choice((None, "a", "b"))
        self.engine.clear(tenant, self.random.choice(("", "m0", "m2")), self.random.random() < 0.5, self.now_s)
        self.sure.clear()

    def op_resize(self) -> None:
        """Somebody changes the size of L1 while all goes on."""
        regions = self.random.randint(1, self.arena.regions)
        self.engine.room.resize(regions, self.now_s)
        self.arena.usable = regions
        self.sure.clear()

    def op_quotas(self) -> None:
        """Somebody gives tenants shares, or takes them away."""
        shares = self.random.choice(({}, {"a": 0.5}, {"a": 0.3, "b": 0.3}, {"b": 1.0}))
        self.engine.room.set_quotas(shares)
        self.sure.clear()

    def op_crash(self) -> None:
        """The server dies; its own copies and fetches with it. Clients live on with what they were told."""
        for proc in self.procs:
            proc.connected = False
            proc.lookups.clear()
            proc.reads.clear()
            proc.stores = proc.stores if proc.moves else []
        self.tier.pending.clear()
        self.tier.done()
        self.arena = self._reopened()
        self.engine = self._engine()
        self.seen_evicted = 0
        recovery = self.engine.recover(self.now_s)
        self.counts["recovered"] += recovery.chunks
        self.counts["quarantined"] += recovery.quarantined
        for proc in self.procs:
            proc.client.arena = self.arena

    def _reopened(self) -> WatchedArena:
        after = self.arena.reopen()
        assert isinstance(after, WatchedArena)
        after.usable = self.arena.usable
        after.procs = self.procs
        return after

    def _watch_evictions(self) -> None:
        evicted = self.engine._core.index.evicted
        if evicted != self.seen_evicted:
            self.seen_evicted = evicted
            self.sure.clear()

    def quiesce(self) -> None:
        """Let everybody go: nothing may be held after that, and nobody owns what belongs to the server."""
        for proc in list(self.procs):
            self.procs.remove(proc)
            self._end_copies(proc)
            self.engine.client_lost(proc.client.client_id, self.now_s, proven_dead=True)
        for client_id in self.unproven:
            self.engine.writers_proven_dead(client_id, self.now_s)
        self.tier.finish()
        for _ in range(3 + self.arena.regions):
            self.now_s += 1000
            self.engine.tick(self.now_s)
        check(self.engine)
        numbers = self.engine.numbers()
        assert numbers.l1_bytes == numbers.l1_wanted_bytes, "what had to go is gone"
        assert numbers.l1_mapped_bytes == 0
        assert (numbers.leases, numbers.sessions, numbers.clients) == (0, 0, 0)
        assert (numbers.pinned_bytes, numbers.quarantined_bytes) == (0, 0)
        assert numbers.slots_used == numbers.chunks
        assert SERVER_OWNED == ""


WEIGHTS = {
    "op_join": 20,
    "op_lose": 4,
    "op_come_back": 20,
    "op_die": 4,
    "op_unregister": 2,
    "op_prepare_store": 150,
    "op_store_all": 60,
    "op_write": 150,
    "op_begin_write": 150,
    "op_end_write": 150,
    "op_commit_store": 130,
    "op_lookup": 200,
    "op_status": 40,
    "op_load": 200,
    "op_begin_read": 60,
    "op_end_read": 60,
    "op_free": 40,
    "op_end_request": 40,
    "op_early_free": 4,
    "op_tick": 60,
    "op_tier": 60,
    "op_clear": 3,
    "op_resize": 3,
    "op_quotas": 3,
    "op_crash": 1,
}
"""How often each operation comes, relative to the others."""

SHORT = (
    "op_prepare_store",
    "op_write",
    "op_commit_store",
    "op_tick",
    "op_tier",
    "op_free",
    "op_lookup",
    "op_store_all",
)
"""What may happen while a load is under way."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    sys.stdout.write(f"seed {seed}\n")
    sys.stdout.flush()
    machine = Machine(seed)
    began_s = time.perf_counter()
    machine.run(options.ops)
    took_s = time.perf_counter() - began_s
    for name, count in sorted(machine.counts.items()):
        sys.stdout.write(f"{count:10d} {name}\n")
    rate = options.ops / took_s
    sys.stdout.write(f"{options.ops} operations in {took_s:.1f} s, {rate:.0f} a second, wrong bytes: 0, seed {seed}\n")


if __name__ == "__main__":
    main()
