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
from dataclasses import asdict, dataclass, field

import numpy as np

from kvpool.connector.attach import Session
from kvpool.connector.chunks import EngineRequest
from kvpool.connector.hits import Hits, Tracked
from kvpool.connector.plan import PlannedLoad, PlannedStore, StepPlan
from kvpool.model.identity import Role
from kvpool.model.keys import DIGEST_BYTES

__all__ = ["Blocks", "SchedulerSide", "Step"]

Blocks = Sequence[int]


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
class _Counts:
    """Totals since the start."""

    loads: int = 0
    failed_loads: int = 0
    stores: int = 0


@dataclass(slots=True)
class _Pending:
    """What the next plan has to say."""

    loads: list[PlannedLoad] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


class SchedulerSide:
    """See the module."""

    def __init__(self, hits: Hits, *, role: Role, block_tokens: int, store_generated: bool) -> None:
        """Make it.

        Args:
            hits: the requests' lookups.
            role: which directions the engine may use.
            block_tokens: tokens of one of the engine's blocks.
            store_generated: also store chunks with generated tokens.
        """
        self._hits = hits
        self._stores = role.stores
        self._block_tokens = block_tokens
        self._store_generated = store_generated
        self._requests: dict[str, Tracked] = {}
        self._loading: set[str] = set()
        self._asking = False
        self._next = _Pending()
        self._counts = _Counts()

    # --- hits ------------------------------------------------------------------------------------------------------

    def arrived(self, request: EngineRequest, session: Session | None, now_s: float) -> None:
        """The engine took a new request."""
        tracked = self._requests[request.request_id] = Tracked(request)
        self._hits.early(tracked, session, now_s)

    def matched(
        self, request: EngineRequest, local_tokens: int, session: Session | None, now_s: float
    ) -> tuple[int | None, bool]:
        """Say how many tokens beyond *local_tokens* can be loaded; (None, False) while the answer is pending.

        May be called any number of times for a request that waits. A local hit that ends inside a block gets no load:
        blocks are written whole, and that one may be shared.
        """
        tracked = self._requests.setdefault(request.request_id, Tracked(request))
        answer = self._hits.found(tracked, session, now_s)
        if answer is None:
            self._asking = True
            return None, False
        tracked.local_tokens = local_tokens
        external = answer.chunks * tracked.chunk_tokens - local_tokens
        return (external, True) if external > 0 and not local_tokens % self._block_tokens else (0, False)

    def allocated(self, request_id: str, blocks: Blocks, external_tokens: int) -> None:
        """The engine gave the request *blocks* (all of its table) to load *external_tokens* into, or to compute."""
        tracked = self._requests[request_id]
        if tracked.answer is None or tracked.loading:
            return
        tracked.kept = tracked.answer.chunks
        if not external_tokens:
            self._hits.release(tracked)
            return
        load = self._load(tracked, tracked.answer.lookup_id, blocks, external_tokens)
        self._hits.use(tracked, load.first, external_tokens)
        self._next.loads.append(load)
        self._counts.loads += 1
        tracked.loading = frozenset(np.frombuffer(load.blocks, dtype="<i8")[load.skip_blocks :].tolist())
        self._loading.add(request_id)

    def received(self, request_ids: Iterable[str], bad_blocks: Iterable[int]) -> None:
        """Workers ended the loads of *request_ids*; *bad_blocks* (of any load) hold no valid data.

        A rank may name bad blocks before the last rank has ended the load.
        """
        bad = frozenset(bad_blocks)
        for request_id in self._loading if bad else ():
            tracked = self._requests[request_id]
            if tracked.loading & bad and not tracked.failed:
                self._hits.failed(tracked)
                self._counts.failed_loads += 1
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
        if session is not None and self._stores:
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
        self._loading.discard(request_id)
        self._hits.end(tracked)
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
        return asdict(self._counts) | asdict(self._hits.counts)

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _load(self, tracked: Tracked, lookup_id: bytes, blocks: Blocks, external_tokens: int) -> PlannedLoad:
        """Plan a load of the chunks that hold *external_tokens* after the local ones."""
        first, skipped = divmod(tracked.local_tokens, tracked.chunk_tokens)
        end = (tracked.local_tokens + external_tokens) // tracked.chunk_tokens
        return PlannedLoad(
            request_id=tracked.request.request_id,
            lookup_id=lookup_id,
            first=first,
            end=end,
            blocks=self._chunk_blocks(blocks, first, end, tracked.chunk_tokens),
            skip_blocks=skipped // self._block_tokens,
        )

    def _preempt(self, request_id: str) -> None:
        """Its blocks are gone and with them the stores that were reading them."""
        if (tracked := self._requests.get(request_id)) is not None:
            tracked.kept = 0
            self._hits.release(tracked)

    def _store(self, request_id: str, computed_tokens: int, step: Step, session: Session) -> PlannedStore | None:
        """Plan a store of the full chunks that this step completes and that nobody is known to keep."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return None
        request = tracked.request
        limit = request.num_tokens if self._store_generated else request.num_prompt_tokens
        end = min(computed_tokens, limit) // session.chunk_tokens
        if end <= tracked.kept or not self._hits.cacheable(tracked, session):
            return None
        end = min(end, self._hits.extend(tracked, end * session.chunk_tokens))
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
