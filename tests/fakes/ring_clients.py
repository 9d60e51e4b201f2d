# SPDX-License-Identifier: Apache-2.0
"""GPU clients of a server's handlers, over an engine in memory and movers that follow a script."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tests.fakes.arena import MemoryArena
from tests.fakes.engines import FakeClient, digests, engine, fresh_id
from tests.fakes.scripted_movers import Hand, ScriptedMover, ScriptedMovers

from kvpool.metrics.numbers import Numbers
from kvpool.model.errors import CacheError
from kvpool.model.identity import ClientKind, Mode
from kvpool.model.slots import PLACEMENT, Disposition
from kvpool.server.caching import CachingVerbs
from kvpool.server.calls import Answer, Call, Client
from kvpool.server.rings import Rings
from kvpool.wire.messages import (
    CommitRetrieve,
    CommitStore,
    FreeLookup,
    Lookup,
    PrepareRetrieve,
    PrepareStore,
    RingFacts,
    RingNews,
    WatchRing,
)

READ_CHUNKS = 1 << 20


class Held:
    """Stands for ``Answers``: what is held, and what came of it."""

    def __init__(self) -> None:
        self.open: set[Call] = set()
        self.ended: dict[Call, Answer | CacheError] = {}

    def hold(self, call: Call) -> None:
        self.open.add(call)

    def finish(self, call: Call, answer: Answer, now_s: float) -> None:
        del now_s
        self._end(call, answer)

    def fail(self, call: Call, error: CacheError, now_s: float) -> None:
        del now_s
        self._end(call, error)

    def _end(self, call: Call, outcome: Answer | CacheError) -> None:
        if not call.ended:
            call.ended = True
            self.open.discard(call)
            self.ended[call] = outcome

    def abandon(self, client: Client) -> None:
        for call in [call for call in self.open if call.owner is client]:
            call.ended = True
            self.open.discard(call)


class RingWorld:
    """A server's handlers of stores, loads and rings, without sockets and processes; ``now_s`` is its clock."""

    def __init__(self, regions: int = 2) -> None:
        self.now_s = 0.0
        self.arena = MemoryArena(regions=regions)
        self.engine = engine(self.arena)
        self.movers = ScriptedMovers()
        self.numbers = Numbers()
        self.answers = Held()
        self.clock = lambda: self.now_s
        self.rings = Rings(self.movers, self.engine.movers, self.answers, self.numbers, self.clock)  # type: ignore[arg-type]
        self.verbs = CachingVerbs(self)  # type: ignore[arg-type]
        self.slots = self.engine._core.index.slots

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass, and what is due happen."""
        self.now_s += seconds
        # Movers lock the regions that they map.
        mapped = {memory for mover in self.movers.all() for memory in mover.given}
        self.arena.outside_writers = {memory % self.arena.regions for memory in mapped}
        self.engine.tick(self.now_s)
        self.rings.keep_house(self.now_s)
        self.rings.turn(self.now_s)

    def hands(self, mover: ScriptedMover | None = None) -> list[Hand]:
        """All that a mover, or any, may still touch."""
        movers = self.movers.all() if mover is None else [mover]
        return [hand for each in movers for hand in each.grants.values()]

    def close(self) -> None:
        for mover in self.movers.all():
            self.movers.end(mover.mover_id, "")
        for mover in [*self.movers.ending]:
            self.movers.reap(mover)
        self.rings.turn(self.now_s)
        self.rings.close(0.0)


class RingClient:
    """One GPU worker. Its ring is registered and not joined."""

    _generations = itertools.count(1)

    def __init__(self, world: RingWorld) -> None:
        self.world = world
        self.fake = FakeClient(world.engine, world.arena, Mode.RING).join(world.now_s)
        self.client = Client(
            self.fake.client_id, ClientKind.WORKER, "t", "label", bytes(16), peer=None, seen_s=0.0, expires_s=None
        )  # type: ignore[arg-type]
        self.register_ring()

    def register_ring(self) -> None:
        facts = RingFacts(
            device=bytes(16), handle=bytes(64), slot_bytes=1 << 16, slots=2, generation=next(self._generations)
        )
        self.world.rings.register(self.fake.client_id, facts, 1, "tcp:127.0.0.1:1")

    def watch(self, *, joined: bool = False, retired: str = "", wait_s: float = 0.0) -> tuple[Call, RingNews | None]:
        """Ask for news; None while there are none."""
        call = self._call()
        answer = self.world.rings.watch(
            call, WatchRing(joined=joined, retired=retired, wait_s=wait_s), self.world.now_s
        )
        return call, None if answer is None else answer.reply  # type: ignore[return-value]

    def join(self) -> ScriptedMover:
        """Do all until its chunks go through the ring; returns its mover."""
        self.world.turn()
        mover = next(m for m in self.world.movers.living.values() if not m.ready)
        self.world.movers.say_ready(mover)
        self.world.turn()
        self.watch(joined=True)
        return mover

    def prepare(self, *numbers: int, chain: int = 0) -> tuple[bytes, bytes, NDArray[np.void]]:
        """Ask where consecutive chunks go; returns the store's id, the grant and the placements."""
        store_id = fresh_id()
        parent = digests(numbers[0] - 1, chain=chain) if numbers[0] else b""
        request = PrepareStore(request_id="r", store_id=store_id, first=numbers[0], parent=parent)
        answer = self.world.verbs.prepare_store(self._call(digests(*numbers, chain=chain)), request)
        return store_id, answer.reply.grant, np.frombuffer(answer.frames[0], dtype=PLACEMENT)  # type: ignore[union-attr]

    def commit(self, store_id: bytes, marks: Sequence[int], *, moving: bool = False) -> tuple[Call, Answer | None]:
        """Say which chunks are there, or will be; None while the answer waits for the mover."""
        call = self._call(bytes(marks), b"")
        return call, self.world.verbs.commit_store(call, CommitStore(store_id=store_id, moving=moving))

    def lookup(self, *numbers: int, chain: int = 0) -> tuple[bytes, int]:
        lookup_id = fresh_id()
        request = Lookup(request_id=lookup_id.hex(), lookup_id=lookup_id)
        return lookup_id, self.world.verbs.lookup(self._call(digests(*numbers, chain=chain)), request).reply.chunks  # type: ignore[union-attr]

    def load(self, lookup_id: bytes, chunks: int) -> tuple[bytes, NDArray[np.void]]:
        """Ask where found chunks lie; returns the grant and the placements."""
        request = PrepareRetrieve(lookup_id=lookup_id, end=chunks)
        answer = self.world.verbs.prepare_retrieve(self._call(), request)
        return answer.reply.grant, np.frombuffer(answer.frames[0], dtype=PLACEMENT)  # type: ignore[union-attr]

    def loaded(self, lookup_id: bytes, chunks: int) -> list[int]:
        """Say that a load has ended well; returns what each of its chunks is worth."""
        request = CommitRetrieve(lookup_id=lookup_id, end=chunks)
        answer = self.world.verbs.commit_retrieve(self._call(bytes(chunks)), request)
        return list(answer.frames[0])

    def loading(self, lookup_id: bytes, chunks: int) -> Call:
        """Commit a load while its mover is still at it."""
        call = self._call(bytes(chunks))
        request = CommitRetrieve(lookup_id=lookup_id, end=chunks, moving=True)
        assert self.world.verbs.commit_retrieve(call, request) is None
        return call

    def free(self, lookup_id: bytes) -> None:
        self.world.verbs.free_lookup(self._call(), FreeLookup(lookup_id=lookup_id, first=0, end=READ_CHUNKS))

    def lose(self, *, proven_dead: bool) -> None:
        """Let it leave without a word."""
        self._release()
        self.world.engine.client_lost(self.fake.client_id, self.world.now_s, proven_dead=proven_dead)

    def unregister(self) -> None:
        """Let it leave, with the promise that all of its own writes are over."""
        self.world.engine.unregister(self.fake.client_id, self.world.now_s)
        self._release()

    def _release(self) -> None:
        self.world.rings.end(self.fake.client_id, "the client left")
        self.world.answers.abandon(self.client)

    def _call(self, *frames: bytes) -> Call:
        call = Call(None, self.world.now_s)  # type: ignore[arg-type]
        call.client, call.frames = self.client, [memoryview(frame) for frame in frames]
        call.deadline_s = self.world.now_s + 60
        return call


def to_write(rows: NDArray[np.void]) -> NDArray[np.int64]:
    """Slots that a store is to fill."""
    return rows["slot"][rows["disposition"] == Disposition.WRITE]
