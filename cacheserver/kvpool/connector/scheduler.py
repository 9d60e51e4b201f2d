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

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from time import monotonic
from typing import Any

import numpy as np

from kvpool.connector.attach import Session
from kvpool.connector.chunks import EngineRequest
from kvpool.connector.groups import Part, Tables, load_part, store_parts
from kvpool.connector.hits import Hits, Tracked
from kvpool.connector.plan import GroupFacts, PlannedLoad, PlannedStore, StepPlan
from kvpool.connector.rates import Rates
from kvpool.connector.wishes import KEY, Wishes, wishes_of
from kvpool.model.identity import Role
from kvpool.model.keys import DIGEST_BYTES

__all__ = ["SchedulerSide", "States", "Step"]

States = Sequence[tuple[int, int, int]]
"""Of one request: (group, block, tokens at whose end that block holds the group's state)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, as scheduled."""

    scheduled: Iterable[tuple[str, int]]
    """Request ids and how many of their tokens are computed when the step has run."""

    blocks_of: Callable[[str], Tables]
    """Block tables of a scheduled request, one for each of the engine's groups."""

    preempted: Iterable[str] = ()
    idle: bool = False
    """True if no model runs in it."""

    states: Mapping[str, States] = field(default_factory=dict)
    """Recurrent states that the engine saves in this step, by request."""

    tokens: int = 0
    """Tokens that it computes, of all requests."""


@dataclass(slots=True)
class _Counts:
    """Totals since the start."""

    loads: int = 0
    failed_loads: int = 0
    loads_not_worth: int = 0
    stores: int = 0


@dataclass(slots=True)
class _Pending:
    """What the next plan has to say."""

    loads: list[PlannedLoad] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


class SchedulerSide:
    """See the module."""

    def __init__(
        self,
        hits: Hits,
        *,
        role: Role,
        groups: Sequence[GroupFacts],
        store_generated: bool,
        store_min_tokens: int = 0,
        load_min_tokens: int = 0,
        rates: Rates | None = None,
    ) -> None:
        """Make it.

        Args:
            hits: the requests' lookups.
            role: which directions the engine may use.
            groups: the engine's cache groups.
            store_generated: also store chunks with generated tokens.
            store_min_tokens: a shorter prompt is not stored.
            load_min_tokens: a hit that brings fewer tokens is computed instead.
            rates: knows which loads are expected to pay; not given: all.
        """
        self._hits = hits
        self._stores = role.stores
        self._groups = tuple(groups)
        self._block_tokens = math.lcm(*(group.block_tokens for group in groups))
        self._store_generated = store_generated
        self._store_min_tokens, self._load_min_tokens = store_min_tokens, max(1, load_min_tokens)
        self._rates = rates or Rates(0)
        self._requests: dict[str, Tracked] = {}
        self._loading: set[str] = set()
        self._asking = False
        self._next = _Pending()
        self._counts = _Counts()

    # --- hits ------------------------------------------------------------------------------------------------------

    def arrived(self, request: EngineRequest, session: Session | None, now_s: float) -> None:
        """The engine took a new request."""
        tracked = self._requests[request.request_id] = Tracked(request, wishes_of(request.kv_transfer_params))
        self._hits.early(tracked, session, now_s)

    def matched(
        self, request: EngineRequest, local_tokens: int, session: Session | None, now_s: float
    ) -> tuple[int | None, bool]:
        """Say how many tokens beyond *local_tokens* can be loaded; (None, False) while the answer is pending.

        May be called any number of times for a request that waits. A local hit that ends inside a block gets no load:
        blocks are written whole, and that one may be shared.
        """
        if (tracked := self._requests.get(request.request_id)) is None:
            tracked = self._requests[request.request_id] = Tracked(request, wishes_of(request.kv_transfer_params))
        answer = self._hits.found(tracked, session, now_s)
        if answer is None:
            self._asking = True
            return None, False
        tracked.local_tokens = local_tokens
        external = answer.chunks * tracked.chunk_tokens - local_tokens
        possible = external >= self._load_min_tokens and not local_tokens % self._block_tokens
        tracked.refused = possible and not self._rates.worth(external)
        return (external, True) if possible and not tracked.refused else (0, False)

    def allocated(self, request_id: str, tables: Tables, external_tokens: int) -> None:
        """The engine gave the request blocks (all of its *tables*) to load *external_tokens* into, or to compute."""
        tracked = self._requests[request_id]
        if tracked.answer is None or tracked.loading:
            return
        tracked.kept = tracked.answer.chunks
        if not external_tokens:
            if tracked.refused:
                self._rates.refuse()
                self._counts.loads_not_worth += 1
            self._hits.release(tracked)
            return
        loads = [*self._load(tracked, tracked.answer.lookup_id, tables, external_tokens)]
        self._hits.use(tracked, tracked.local_tokens // tracked.chunk_tokens, external_tokens)
        self._next.loads += loads
        self._counts.loads += 1
        tracked.loaded_tokens += external_tokens
        written = (np.frombuffer(load.blocks, dtype="<i8")[load.skip_blocks :].tolist() for load in loads)
        tracked.loading = frozenset(chain.from_iterable(written))
        self._loading.add(request_id)

    def received(
        self, request_ids: Iterable[str], bad_blocks: Iterable[int], failed_requests: Iterable[str] = ()
    ) -> None:
        """Workers ended the loads of *request_ids*; *bad_blocks* (of any load) hold no valid data.

        A rank may name bad blocks before the last rank has ended the load. Where blocks of several groups cannot be
        told apart, *failed_requests* are named instead.
        """
        bad, failed = frozenset(bad_blocks), frozenset(failed_requests)
        for request_id in self._loading if bad or failed else ():
            tracked = self._requests[request_id]
            if (request_id in failed or tracked.loading & bad) and not tracked.failed:
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
        stores: list[PlannedStore] = []
        if session is not None and self._stores:
            for request_id, tokens in step.scheduled:
                stores += self._store(request_id, tokens, step, session)
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

    def outcome(self, request_id: str) -> dict[str, Any] | None:
        """Return what a request that asked for something is told in its answer; before ``finished``."""
        tracked = self._requests.get(request_id)
        if tracked is None or KEY not in (tracked.request.kv_transfer_params or ()):
            return None
        return {KEY: {"loaded_tokens": 0 if tracked.failed else tracked.loaded_tokens}}

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

    def reset(self, model: str, timeout_s: float) -> bool:
        """Drop all that the servers keep of *model*; what requests were promised of it is lost, and computed.

        Returns:
            True if every server has done so in time.
        """
        calls = self._hits.clear(model)
        for tracked in self._requests.values():
            # What was computed until now is part of what is dropped.
            tracked.wishes = Wishes(store=False, load=False)
        ends_s = monotonic() + timeout_s
        done = [call.wait(max(0.0, ends_s - monotonic())) and call.error() is None for call in calls]
        return all(done)

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

    def _load(self, tracked: Tracked, lookup_id: bytes, tables: Tables, external_tokens: int) -> Iterator[PlannedLoad]:
        """Plan a load of the chunks that hold *external_tokens* after the local ones."""
        first = tracked.local_tokens // tracked.chunk_tokens
        end = (tracked.local_tokens + external_tokens) // tracked.chunk_tokens
        for group in self._groups:
            part = load_part(group, tables[group.number], (first, end), tracked.chunk_tokens, tracked.local_tokens)
            if part is not None:
                yield PlannedLoad(
                    request_id=tracked.request.request_id,
                    lookup_id=lookup_id,
                    first=part.first,
                    end=part.end,
                    blocks=part.blocks,
                    skip_blocks=part.skip_blocks,
                    group=group.number,
                )

    def _preempt(self, request_id: str) -> None:
        """Its blocks are gone and with them the stores that were reading them."""
        if (tracked := self._requests.get(request_id)) is not None:
            tracked.kept = 0
            self._hits.release(tracked)

    def _store(self, request_id: str, computed_tokens: int, step: Step, session: Session) -> Iterator[PlannedStore]:
        """Plan a store of the full chunks that this step completes and that nobody is known to keep."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        request = tracked.request
        limit = request.num_tokens if self._store_generated else request.num_prompt_tokens
        end = min(computed_tokens, limit) // session.chunk_tokens
        too_short = request.num_prompt_tokens < self._store_min_tokens
        if end <= tracked.kept or too_short or not tracked.wishes.store:
            return
        if not self._hits.cacheable(tracked, session):
            return
        end = min(end, self._hits.extend(tracked, end * session.chunk_tokens))
        first = tracked.kept
        if end <= first:
            return
        tracked.kept, tracked.written = end, True
        self._counts.stores += 1
        tables, states = step.blocks_of(request_id), step.states.get(request_id, ())
        for group in self._groups:
            saved = {tokens: block for number, block, tokens in states if number == group.number}
            for part in store_parts(group, tables[group.number], (first, end), session.chunk_tokens, saved):
                yield _planned_store(tracked, group, part)


def _planned_store(tracked: Tracked, group: GroupFacts, part: Part) -> PlannedStore:
    first, end = part.first * DIGEST_BYTES, part.end * DIGEST_BYTES
    return PlannedStore(
        request_id=tracked.request.request_id,
        first=part.first,
        parent=tracked.digests[first - DIGEST_BYTES : first] if first else b"",
        digests=tracked.digests[first:end],
        blocks=part.blocks,
        group=group.number,
    )
