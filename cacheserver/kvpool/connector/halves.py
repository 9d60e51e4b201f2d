# SPDX-License-Identifier: Apache-2.0
"""The connector's two halves, put together: link, adapter, decisions and numbers, behind the net for failures."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, Final

from msgspec.structs import replace

from kvpool.client.group import Member, scheduler_over
from kvpool.client.jobs import Moment
from kvpool.client.watching import Change, Watcher
from kvpool.client.worker import WorkerAdapter
from kvpool.config import ClientConfig
from kvpool.connector.attach import Attachment, Session
from kvpool.connector.chunks import ChunkKeys, EngineRequest
from kvpool.connector.facts import describe_worker, disagreement, layouts_of
from kvpool.connector.fingerprint import Unidentified, adapter_fingerprint
from kvpool.connector.groups import Tables
from kvpool.connector.hits import Hits
from kvpool.connector.idle import NoTransfers
from kvpool.connector.memory import reach
from kvpool.connector.net import Half
from kvpool.connector.plan import StepPlan, WorkerFacts, decode
from kvpool.connector.rates import Rates
from kvpool.connector.scheduler import SchedulerSide, Step
from kvpool.connector.servers import NotPlaced, Placement, Servers, clues_of, join, placements
from kvpool.connector.statistics import server_key
from kvpool.connector.translate import EngineFacts, namespace_of
from kvpool.connector.worker import Transfers, WorkerSide
from kvpool.model.identity import ClientKind
from kvpool.transfer.planes import LayoutError
from kvpool.transfer.tensors import describe_tensors

__all__ = ["SchedulerHalf", "WorkerHalf"]

log = logging.getLogger("kvpool.connector")

CLOSE_S: Final = 2.0


class WorkerHalf(Half):
    """One worker's half. The engine's worker thread calls it."""

    def __init__(self, config: ClientConfig, node: str) -> None:
        super().__init__("worker")
        self._config = config
        self._node = node
        self._side = self._make_side(NoTransfers(), WorkerFacts(), off=True)
        self._transfers: WorkerAdapter | None = None
        self.facts = WorkerFacts(refusal="the engine registered no cache")

    def register(self, engine: EngineFacts, tensors: Mapping[str, Any], packing: Mapping[str, str]) -> None:
        """Take over the engine's cache tensors (layer name to tensor) and connect."""
        self.facts = self._guarded(
            lambda: self._register(engine, tensors, packing), lambda: WorkerFacts(refusal="the connector failed")
        )
        self.refusal = self.facts.refusal

    def refuse(self, reason: str) -> None:
        """Say that this engine cannot be cached."""
        self.facts, self.refusal = WorkerFacts(refusal=reason), reason

    def preempt(self, plan: StepPlan) -> None:
        """See ``WorkerSide.preempt``."""
        self._guarded(lambda: self._side.preempt(plan), lambda: None)

    def begin(self, plan: StepPlan) -> None:
        """See ``WorkerSide.begin``."""
        self._guarded(lambda: self._side.begin(plan), lambda: self._side.take_over(plan))

    def load(self, plan: StepPlan) -> None:
        """See ``WorkerSide.load``."""
        self._guarded(lambda: self._side.load(plan), lambda: self._side.take_over(plan))

    def saved(self, *, ran: bool) -> None:
        """See ``WorkerSide.saved``."""
        self._guarded(lambda: self._side.saved(ran=ran), lambda: None)

    def results(self, plan: StepPlan) -> tuple[set[str], set[str]]:
        """Return released requests whose blocks may go, and requests whose loads ended."""
        return self._guarded(lambda: self._side.results(idle=plan.idle, asking=plan.asking), self._side.abandon)

    def bad_blocks(self) -> set[int]:
        """Return blocks without valid data, once."""
        return self._side.bad_blocks()

    def failed_requests(self) -> set[str]:
        """Return requests whose loads failed, once, where no blocks are named."""
        return self._side.failed_requests()

    def close(self) -> None:
        """End all transfers, then the link."""
        if self._transfers is not None:
            self._transfers.close(CLOSE_S)
        if self.attachment is not None:
            self.attachment.close(CLOSE_S)

    def _register(self, engine: EngineFacts, tensors: Mapping[str, Any], packing: Mapping[str, str]) -> WorkerFacts:
        ordered = {name: tensors[name] for group in engine.groups for name in group.layers} | dict(tensors)
        try:
            described, storages = describe_tensors(ordered, dict(packing))
            layouts = layouts_of(engine, described)
            moved = reach(layouts, storages, self._config)
        except LayoutError as e:
            return WorkerFacts(refusal=str(e))
        facts = describe_worker(engine, layouts, self._node, self._config.server)
        self.attachment = attachment = Attachment(
            replace(self._config, modes=moved.modes), ClientKind.WORKER, moved.ring, why_no_ring=moved.why_no_ring
        )
        rings = moved.ring.keeper if moved.ring is not None else None
        self._transfers = WorkerAdapter(attachment.link, moved.blocks, self._config, rings=rings)
        self._side = self._make_side(self._transfers, facts, moment=moved.moment)
        attachment.begin(facts, (facts.shard,))
        return facts

    def _make_side(
        self,
        transfers: Transfers,
        facts: WorkerFacts,
        *,
        off: bool = False,
        moment: Callable[[], Moment | None] = lambda: None,
    ) -> WorkerSide:
        side = WorkerSide(
            transfers,
            place=(facts.stage, facts.shard),
            writer=facts.writer,
            role=self._config.role,
            groups=facts.groups,
            timeout_s=self._config.transfer_s,
            moment=moment,
        )
        side.off = off
        return side

    def _totals(self) -> Mapping[str, float]:
        moved = self._transfers.counters() if self._transfers is not None else {}
        return {
            **super()._totals(),
            **self._side.counters(),
            "loaded_bytes": moved.get("bytes_loaded", 0),
            "stored_bytes": moved.get("bytes_stored", 0),
            "stored_chunks": moved.get("chunks_stored", 0),
            "dropped_stores": sum(value for name, value in moved.items() if name.startswith("stores_dropped_")),
        }


class SchedulerHalf(Half):
    """The scheduler's half. The engine's scheduling thread calls it."""

    def __init__(
        self, config: ClientConfig, node: str, *, watches: bool = False, clock: Callable[[], float] = monotonic
    ) -> None:
        """Make it; *watches*: somebody wants cache events."""
        super().__init__("scheduler")
        self._config = config
        self._node = node
        self._side: SchedulerSide | None = None
        self._clock = clock
        self._watches = watches
        self._rates = Rates(config.load_budget)
        self._model = ""
        self._watcher: Watcher | None = None
        self._adapters: dict[tuple[int, str], str | None] = {}

    def attach(self, workers: Sequence[bytes]) -> None:
        """Learn from the workers what they cache, and connect."""
        self._guarded(lambda: self._attach([decode(data, WorkerFacts) for data in workers]), lambda: None)

    def arrived(self, request: EngineRequest, now_s: float) -> None:
        """See ``SchedulerSide.arrived``."""
        if (side := self._side) is not None:
            self._guarded(lambda: side.arrived(request, self._session(), now_s), lambda: None)

    def matched(self, request: EngineRequest, local_tokens: int, now_s: float) -> tuple[int | None, bool]:
        """See ``SchedulerSide.matched``."""
        if (side := self._side) is None:
            return 0, False
        return self._guarded(lambda: side.matched(request, local_tokens, self._session(), now_s), lambda: (0, False))

    def allocated(self, request_id: str, tables: Tables, external_tokens: int) -> None:
        """See ``SchedulerSide.allocated``."""
        if (side := self._side) is not None:
            self._guarded(lambda: side.allocated(request_id, tables, external_tokens), lambda: None)
            if external_tokens:
                self._rates.load_began(request_id, external_tokens, self._clock())

    def received(
        self, request_ids: Iterable[str], bad_blocks: Iterable[int], failed_requests: Iterable[str] = ()
    ) -> None:
        """See ``SchedulerSide.received``."""
        if (side := self._side) is not None:
            self._guarded(lambda: side.received(request_ids, bad_blocks, failed_requests), lambda: None)
            now_s = self._clock()
            self._rates.step_ended(now_s)
            for request_id in request_ids:
                # Blocks are named for any load: where there are some, no load of this step is a good sample.
                well = not bad_blocks and request_id not in failed_requests
                self._rates.load_ended(request_id, now_s, well=well)

    def plan(self, step: Step) -> StepPlan:
        """See ``SchedulerSide.plan``."""
        if (side := self._side) is None:
            return StepPlan(idle=step.idle)
        self._rates.step_began(0 if step.idle else step.tokens, self._clock())
        return self._guarded(lambda: side.plan(step, self._session()), side.give_up)

    def outcome(self, request_id: str) -> dict[str, Any] | None:
        """See ``SchedulerSide.outcome``."""
        if (side := self._side) is None:
            return None
        return self._guarded(lambda: side.outcome(request_id), lambda: None)

    def reset(self) -> bool:
        """Drop all that the servers keep of this engine's model; waits for them, at most ``request_s``.

        Returns:
            False if a server did not say that it has done so.
        """
        if (side := self._side) is None:
            return True
        return self._guarded(lambda: side.reset(self._model, self._config.request_s), lambda: False)

    def events(self) -> tuple[Change, int]:
        """Return which chunks came and went at the engine's first server since the last call, and a chunk's tokens."""
        watcher, session = self._watcher, self._session()
        if watcher is None or session is None:
            return Change(), 0
        return self._guarded(lambda: watcher.poll(self._clock()), Change), session.chunk_tokens

    def finished(self, request_id: str) -> bool:
        """See ``SchedulerSide.finished``."""
        if (side := self._side) is None:
            return False
        self._rates.forget(request_id)
        return self._guarded(lambda: side.finished(request_id), lambda: False)

    def close(self) -> None:
        """End the link."""
        if self.attachment is not None:
            self.attachment.close(CLOSE_S)

    def _attach(self, workers: Sequence[WorkerFacts]) -> None:
        placed: tuple[Placement, ...] = ()
        self.refusal = disagreement(workers)
        if not self.refusal:
            try:
                config = self._config
                listed = bool(config.servers or config.servers_file)
                placed = placements(workers, self._node, config.all_servers, listed=listed)
            except NotPlaced as e:
                self.refusal = str(e)
        if self.refusal:
            log.warning("kvpool: the engine runs uncached: %s", self.refusal)
            return
        facts = workers[0]
        self._model = facts.namespace.model if facts.namespace is not None else ""
        groups = {group.number: group for worker in workers for group in worker.groups}
        assert facts.namespace is not None
        links = {p.label: self._attachment(p) for p in placed}
        self.attachment = join(links)
        hits = Hits(
            scheduler_over([Member(p.label, links[p.label].link, p.shards, p.stage) for p in placed], self._config),
            loads=self._config.role.loads,
            shards=tuple(range(facts.namespace.shard_count)),
            keys=lambda chunk_tokens: ChunkKeys(
                namespace_of(facts, chunk_tokens),
                chunk_tokens=chunk_tokens,
                hash_tokens=facts.hash_tokens,
                identify_adapter=self._identify,
            ),
            whole=facts.by_block,
        )
        # Digests that are not the engine's own hashes would mean nothing to who listens to it.
        if self._watches and facts.hash_tokens:
            self._watcher = Watcher(links[placed[0].label].link)
        self._side = SchedulerSide(
            hits,
            role=self._config.role,
            groups=[group for _, group in sorted(groups.items())],
            store_generated=self._config.store_generated,
            store_min_tokens=self._config.store_min_tokens,
            load_min_tokens=self._config.load_min_tokens,
            rates=self._rates,
        )
        for place in placed:
            links[place.label].begin(place.facts, place.shards)
        self.attachment.wait_verdict(self._config.connect_s)

    def _attachment(self, place: Placement) -> Attachment:
        config = replace(self._config, server=place.server)
        return Attachment(config, ClientKind.SCHEDULER, clues=clues_of(place, self._config.server))

    def _session(self) -> Session | None:
        return None if self.attachment is None else self.attachment.session()

    def _identify(self, adapter: Any) -> str | None:
        """Fingerprint an adapter as it is when it is first seen under its id: the engine keeps what it loaded then."""
        if adapter.load_inplace:
            return None
        key = (adapter.lora_int_id, adapter.lora_path)
        if key not in self._adapters:
            try:
                self._adapters[key] = adapter_fingerprint(adapter.lora_path, None)
            except (Unidentified, OSError) as e:
                log.warning("kvpool: requests of adapter %s are not cached: %s", adapter.lora_name, e)
                self._adapters[key] = None
        return self._adapters[key]

    def _totals(self) -> Mapping[str, float]:
        counts = self._side.counters() if self._side is not None else {}
        down = self.attachment.down() if isinstance(self.attachment, Servers) else 0
        # Failed loads are counted where they fail, by the workers.
        counted = {name: value for name, value in counts.items() if name != "failed_loads"}
        states = self.attachment.states() if self.attachment is not None else {}
        stand = {server_key(server, state.reason): 1.0 for server, state in states.items()}
        return {**super()._totals(), **counted, "servers_down": down, **stand}
