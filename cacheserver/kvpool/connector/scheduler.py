# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: which requests hit, what is loaded, what is stored, when blocks may go.

A plain class that runs without the engine; the engine's single scheduling thread calls it. Nothing here waits.

    arrived -> matched (again and again) -> allocated -> plan ... received -> allocated -> plan ... finished
                                              |                     |
                                              a load is planned     it failed: the same request sees a miss from now on

Who holds a request's blocks: the engine while it runs or loads; from ``finished`` returning True until each worker has
said that no store reads them. Blocks taken away by preemption are named in the plan of the step that may overwrite
them, and workers end all gathers of them before it begins.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from kvpool.client.jobs import Answer
from kvpool.connector.attach import Session
from kvpool.connector.chunks import ChunkKeys, EngineRequest
from kvpool.connector.plan import PlannedLoad, PlannedStore, StepPlan
from kvpool.model.identity import Role
from kvpool.model.keys import DIGEST_BYTES

__all__ = ["Lookups", "SchedulerSide", "Step"]

EARLY_LOOKUPS: Final = 16
"""Requests whose lookup is sent on arrival; others are looked up when the scheduler asks: a long queue pins little."""

LEASE_SHARE: Final = 0.5
"""Part of a lookup's lease after which a request that still waits is looked up again."""

Blocks = Sequence[int]


class Lookups(Protocol):
    """The client's scheduler adapter."""

    def lookup(self, request_id: str, digests: bytes, shards: tuple[int, ...]) -> None:
        """Ask for the longest prefix; replaces the request's former lookup."""

    def answer(self, request_id: str) -> Answer | None:
        """Return the answer, or None while it is pending."""

    def free(self, request_id: str, first: int, end: int) -> None:
        """Unpin chunks [first, end)."""

    def release(self, request_id: str) -> None:
        """Forget the request's lookup and unpin all of it."""

    def end(self, request_id: str) -> None:
        """The engine is done with the request."""

    def forget_failed(self, request_id: str) -> None:
        """A load failed: the request's lookup is over."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, as scheduled."""

    scheduled: Iterable[tuple[str, int]]
    """Request ids and how many of their tokens are computed when the step has run."""

    blocks_of: Callable[[str], Blocks]
    """Block table of a scheduled request."""

    preempted: Iterable[str] = ()
    idle: bool = False
    """True if no model runs in it."""


@dataclass(slots=True)
class _Tracked:
    """One request that the engine knows."""

    request: EngineRequest
    objection: str | None = None
    """Why it is not cached; empty if it is, None before it was looked at."""

    chunk_tokens: int = 0
    digests: bytes = b""
    epoch: int = 0
    """Session of its lookup."""

    asked_s: float | None = None
    """When the lookup was sent; None if there is none."""

    answer: Answer | None = None
    local_tokens: int = 0
    loading: frozenset[int] = frozenset()
    """Blocks that a load is writing."""

    kept: int = 0
    """Chunks at the start that need no store (any more)."""

    written: bool = False
    """A store was planned: workers may read its blocks after its end."""

    failed: bool = False


@dataclass(slots=True)
class _Counts:
    lookups: int = 0
    hits: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    loads: int = 0
    failed_loads: int = 0
    stores: int = 0
    uncacheable_requests: int = 0


@dataclass(slots=True)
class _Pending:
    """What the next plan has to say."""

    loads: list[PlannedLoad] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


class SchedulerSide:
    """See the module."""

    def __init__(
        self,
        lookups: Lookups,
        *,
        role: Role,
        shards: tuple[int, ...],
        block_tokens: int,
        store_generated: bool,
        keys: Callable[[int], ChunkKeys],
    ) -> None:
        """Make it.

        Args:
            lookups: the client's adapter.
            role: which directions the engine may use.
            shards: all shards of a chunk.
            block_tokens: tokens of one of the engine's blocks.
            store_generated: also store chunks with generated tokens.
            keys: makes digests for chunks of the given number of tokens.
        """
        self._lookups = lookups
        self._role = role
        self._shards = shards
        self._block_tokens = block_tokens
        self._store_generated = store_generated
        self._make_keys = keys
        self._keys: ChunkKeys | None = None
        self._requests: dict[str, _Tracked] = {}
        self._waiting: set[str] = set()
        """Requests with a lookup that has not been used or freed."""
        self._loading: set[str] = set()
        self._asking = False
        self._next = _Pending()
        self._counts = _Counts()

    # --- hits ------------------------------------------------------------------------------------------------------

    def arrived(self, request: EngineRequest, session: Session | None, now_s: float) -> None:
        """The engine took a new request."""
        tracked = self._requests[request.request_id] = _Tracked(request)
        if session is not None and len(self._waiting) < EARLY_LOOKUPS and self._may_load(tracked, session):
            self._ask(tracked, session, now_s)

    def matched(
        self, request: EngineRequest, local_tokens: int, session: Session | None, now_s: float
    ) -> tuple[int | None, bool]:
        """Say how many tokens beyond *local_tokens* can be loaded; (None, False) while the answer is pending.

        May be called any number of times for a request that waits. A local hit that ends inside a block gets no load:
        what that block holds already must not be written again.
        """
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        if session is None or local_tokens % self._block_tokens or not self._may_load(tracked, session):
            self._drop(tracked)
            return 0, False
        if not self._has_lookup(tracked, session, now_s):
            self._ask(tracked, session, now_s)
        if tracked.answer is None:
            tracked.answer = self._lookups.answer(request.request_id)
        if tracked.answer is None:
            self._asking = True
            return None, False
        tracked.local_tokens = local_tokens
        external = tracked.answer.chunks * session.chunk_tokens - local_tokens
        return (external, True) if external > 0 else (0, False)

    def allocated(self, request_id: str, blocks: Blocks, external_tokens: int) -> None:
        """The engine gave the request *blocks* (all of its table) to load *external_tokens* into, or to compute."""
        tracked = self._requests[request_id]
        if tracked.answer is None or tracked.loading:
            return
        answer, chunk_tokens = tracked.answer, tracked.chunk_tokens
        tracked.kept = answer.chunks
        if not external_tokens:
            self._drop(tracked)
            return
        first, skipped = divmod(tracked.local_tokens, chunk_tokens)
        end = (tracked.local_tokens + external_tokens) // chunk_tokens
        load = PlannedLoad(
            request_id=request_id,
            lookup_id=answer.lookup_id,
            first=first,
            end=end,
            blocks=self._chunk_blocks(blocks, first, end, chunk_tokens),
            skip_blocks=skipped // self._block_tokens,
        )
        self._next.loads.append(load)
        self._counts.loads += 1
        self._count_lookup(tracked, external_tokens)
        self._lookups.free(request_id, 0, first)
        self._settle(tracked)
        written = np.frombuffer(load.blocks, dtype="<i8")[load.skip_blocks :]
        tracked.loading = frozenset(written.tolist())
        self._loading.add(request_id)

    def received(self, request_ids: Iterable[str], bad_blocks: Iterable[int]) -> None:
        """Workers ended the loads of *request_ids*; *bad_blocks* (of any load) hold no valid data.

        A rank may name bad blocks before the last rank has ended the load.
        """
        bad = frozenset(bad_blocks)
        for request_id in self._loading if bad else ():
            tracked = self._requests[request_id]
            if tracked.loading & bad and not tracked.failed:
                tracked.failed, tracked.kept = True, 0
                self._counts.failed_loads += 1
                self._lookups.forget_failed(request_id)
        for request_id in request_ids:
            if request_id in self._loading:
                self._loading.remove(request_id)
                self._requests[request_id].loading = frozenset()

    # --- steps -----------------------------------------------------------------------------------------------------

    def plan(self, step: Step, session: Session | None) -> StepPlan:
        """Say what workers do in this step; to be called once for each step, in order."""
        preempted = tuple(step.preempted)
        for request_id in preempted:
            self._preempt(request_id)
        stores = []
        if session is not None and self._role.stores:
            planned = (self._store(request_id, tokens, step, session) for request_id, tokens in step.scheduled)
            stores = [store for store in planned if store is not None]
        pending, self._next = self._next, _Pending()
        asking, self._asking = self._asking, False
        return StepPlan(
            chunk_tokens=session.chunk_tokens if session is not None and (stores or pending.loads) else 0,
            loads=tuple(pending.loads),
            stores=tuple(stores),
            preempted=preempted,
            released=tuple(pending.released),
            idle=step.idle,
            asking=step.idle and asking,
        )

    def finished(self, request_id: str) -> bool:
        """The engine is done with a request; True if its blocks must stay until each worker said so.

        While a load still writes its blocks the engine itself holds them until the load's end, and no store can read
        them: stores of a former run of the request ended when it was preempted.
        """
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return False
        self._waiting.discard(request_id)
        self._loading.discard(request_id)
        if tracked.epoch:
            self._lookups.end(request_id)
        if not tracked.written or tracked.loading:
            return False
        self._next.released.append(request_id)
        return True

    def give_up(self) -> StepPlan:
        """Return the plan after a failure of this half: everything ends, no block stays held for ever."""
        released, self._next = self._next.released, _Pending()
        self._requests.clear()
        self._loading.clear()
        return StepPlan(released=tuple(released), off=True)

    def counters(self) -> dict[str, float]:
        """Return what happened since the start."""
        return {name: getattr(self._counts, name) for name in _Counts.__slots__}

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _may_load(self, tracked: _Tracked, session: Session) -> bool:
        request = tracked.request
        return (
            self._role.loads
            and not tracked.failed
            and not request.skip_reading_prefix_cache
            and request.num_tokens >= session.chunk_tokens
            and self._cacheable(tracked, session)
        )

    def _cacheable(self, tracked: _Tracked, session: Session) -> bool:
        if self._keys is None or self._keys.chunk_tokens != session.chunk_tokens:
            self._keys = self._make_keys(session.chunk_tokens)
        if tracked.chunk_tokens != session.chunk_tokens:
            tracked.chunk_tokens, tracked.digests, tracked.kept = session.chunk_tokens, b"", 0
        if tracked.objection is None:
            tracked.objection = self._keys.objection(tracked.request)
            self._counts.uncacheable_requests += bool(tracked.objection)
        return not tracked.objection

    def _extend(self, tracked: _Tracked, end_tokens: int) -> int:
        """Make digests of the chunks in the first *end_tokens*; returns how many there are now."""
        assert self._keys is not None
        tracked.digests = self._keys.extend(tracked.request, tracked.digests, end_tokens)
        return len(tracked.digests) // DIGEST_BYTES

    def _ask(self, tracked: _Tracked, session: Session, now_s: float) -> None:
        request_id = tracked.request.request_id
        self._extend(tracked, tracked.request.num_tokens)
        if tracked.epoch:
            self._lookups.release(request_id)
        self._lookups.lookup(request_id, tracked.digests, self._shards)
        tracked.asked_s, tracked.answer, tracked.epoch = now_s, None, session.epoch
        self._waiting.add(request_id)

    def _has_lookup(self, tracked: _Tracked, session: Session, now_s: float) -> bool:
        return (
            tracked.asked_s is not None
            and tracked.epoch == session.epoch
            and now_s - tracked.asked_s < LEASE_SHARE * session.lookup_lease_s
        )

    def _drop(self, tracked: _Tracked) -> None:
        """Let go of a lookup that nothing will be loaded from."""
        if tracked.asked_s is not None:
            if tracked.answer is not None:
                self._count_lookup(tracked, 0)
            self._lookups.release(tracked.request.request_id)
            self._settle(tracked)

    def _settle(self, tracked: _Tracked) -> None:
        tracked.asked_s = tracked.answer = None
        self._waiting.discard(tracked.request.request_id)

    def _count_lookup(self, tracked: _Tracked, hit_tokens: int) -> None:
        self._counts.lookups += 1
        self._counts.hits += hit_tokens > 0
        self._counts.lookup_tokens += tracked.request.num_tokens - tracked.local_tokens
        self._counts.hit_tokens += hit_tokens

    def _preempt(self, request_id: str) -> None:
        """Its blocks are gone and with them the stores that were reading them."""
        if (tracked := self._requests.get(request_id)) is not None:
            tracked.kept = 0
            self._drop(tracked)

    def _store(self, request_id: str, computed_tokens: int, step: Step, session: Session) -> PlannedStore | None:
        """Plan a store of the full chunks that this step completes and that nobody is known to keep."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return None
        request = tracked.request
        limit = request.num_tokens if self._store_generated else request.num_prompt_tokens
        end = min(computed_tokens, limit) // session.chunk_tokens
        if end <= tracked.kept or not self._cacheable(tracked, session):
            return None
        end = min(end, self._extend(tracked, end * session.chunk_tokens))
        first = tracked.kept
        if end <= first:
            return None
        tracked.kept, tracked.written = end, True
        self._counts.stores += 1
        digests = tracked.digests
        return PlannedStore(
            request_id=request_id,
            first=first,
            parent=digests[(first - 1) * DIGEST_BYTES : first * DIGEST_BYTES] if first else b"",
            digests=digests[first * DIGEST_BYTES : end * DIGEST_BYTES],
            blocks=self._chunk_blocks(step.blocks_of(request_id), first, end, session.chunk_tokens),
        )

    def _chunk_blocks(self, blocks: Blocks, first: int, end: int, chunk_tokens: int) -> bytes:
        """Return the blocks of chunks [first, end) as bytes."""
        per_chunk = chunk_tokens // self._block_tokens
        part = np.array(blocks[first * per_chunk : end * per_chunk], dtype="<i8")
        if part.size != (end - first) * per_chunk or not part.all():
            raise ValueError(f"chunks {first} to {end} are not all in blocks of the request: {part.tolist()}")
        return part.tobytes()
