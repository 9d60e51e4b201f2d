# SPDX-License-Identifier: Apache-2.0
"""The connector's two halves, put together: link, adapter, decisions and numbers, behind one net for failures.

Nothing of ours may fail an engine. The first exception in a half is logged with its traceback and turns that half off:
the scheduler's then answers misses and tells all workers to end their stores; a worker's reports every load as bad and
every block as released. The engine goes on uncached until its restart, visibly (``kvpool_uncached{reason="failed"}``).
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from kvpool.client.group import Member, scheduler_over
from kvpool.client.jobs import Finished, Moment
from kvpool.client.worker import WorkerAdapter
from kvpool.config import ClientConfig
from kvpool.connector.attach import Attachment, Session
from kvpool.connector.chunks import ChunkKeys, EngineRequest
from kvpool.connector.fingerprint import Unidentified, adapter_fingerprint
from kvpool.connector.groups import Tables
from kvpool.connector.hits import Hits
from kvpool.connector.memory import reach
from kvpool.connector.plan import GroupFacts, StepPlan, WorkerFacts, decode
from kvpool.connector.scheduler import SchedulerSide, Step
from kvpool.connector.servers import NotPlaced, Placement, Servers, join, placements
from kvpool.connector.statistics import Sampler
from kvpool.connector.translate import EngineFacts, namespace_of
from kvpool.connector.worker import Transfers, WorkerSide
from kvpool.model.identity import ClientKind
from kvpool.transfer.planes import Layout, LayoutError, PagedTensor, layout_of
from kvpool.transfer.tensors import describe_tensors

__all__ = ["SchedulerHalf", "WorkerHalf", "describe_worker"]

T = TypeVar("T")

log = logging.getLogger("kvpool.connector")

CLOSE_S: Final = 2.0


class _Half:
    """The net, and the numbers."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._faults = 0
        self.attachment: Attachment | Servers | None = None
        self.refusal = ""
        """Why this engine is not cached at all, in words."""
        self.off = False
        self._sampler = Sampler(name, lambda: self._faults_alone() if self.off else self._totals(), self._uncached)

    def _guarded(self, step: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Run *step*; after a failure, now or before, *otherwise*."""
        if not self.off:
            try:
                return step()
            except Exception:
                self._faults += 1
                self.off = True
                log.exception("kvpool: the connector's %s half failed; the engine runs uncached", self._name)
        return otherwise()

    def _totals(self) -> Mapping[str, float]:
        return self._faults_alone()

    def _faults_alone(self) -> Mapping[str, float]:
        """All that can still be counted after a failure."""
        return {"faults": self._faults}

    def _uncached(self) -> str:
        if self.off:
            return "failed"
        if self.refusal:
            return "unsupported"
        return str(self.attachment.uncached() or "") if self.attachment is not None else "starting"

    def sample(self) -> dict[str, Any]:
        """Return what there is to count since the last call."""
        return self._guarded(self._sampler.sample, self._sampler.sample)


class WorkerHalf(_Half):
    """One worker's half. The engine's worker thread calls it."""

    def __init__(self, config: ClientConfig, node: str) -> None:
        super().__init__("worker")
        self._config = config
        self._node = node
        self._side = self._make_side(_Nothing(), WorkerFacts(), off=True)
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
        self.attachment = attachment = Attachment(self._config, ClientKind.WORKER, moved.ring)
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


class SchedulerHalf(_Half):
    """The scheduler's half. The engine's scheduling thread calls it."""

    def __init__(self, config: ClientConfig, node: str) -> None:
        super().__init__("scheduler")
        self._config = config
        self._node = node
        self._side: SchedulerSide | None = None
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

    def received(
        self, request_ids: Iterable[str], bad_blocks: Iterable[int], failed_requests: Iterable[str] = ()
    ) -> None:
        """See ``SchedulerSide.received``."""
        if (side := self._side) is not None:
            self._guarded(lambda: side.received(request_ids, bad_blocks, failed_requests), lambda: None)

    def plan(self, step: Step) -> StepPlan:
        """See ``SchedulerSide.plan``."""
        if (side := self._side) is None:
            return StepPlan(idle=step.idle)
        return self._guarded(lambda: side.plan(step, self._session()), side.give_up)

    def finished(self, request_id: str) -> bool:
        """See ``SchedulerSide.finished``."""
        if (side := self._side) is None:
            return False
        return self._guarded(lambda: side.finished(request_id), lambda: False)

    def close(self) -> None:
        """End the link."""
        if self.attachment is not None:
            self.attachment.close(CLOSE_S)

    def _attach(self, workers: Sequence[WorkerFacts]) -> None:
        placed: tuple[Placement, ...] = ()
        self.refusal = _disagreement(workers)
        if not self.refusal:
            try:
                placed = placements(workers, self._node)
            except NotPlaced as e:
                self.refusal = str(e)
        if self.refusal:
            log.warning("kvpool: the engine runs uncached: %s", self.refusal)
            return
        facts = workers[0]
        groups = {group.number: group for worker in workers for group in worker.groups}
        assert facts.namespace is not None
        links = {p.label: Attachment(replace(self._config, server=p.server), ClientKind.SCHEDULER) for p in placed}
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
        self._side = SchedulerSide(
            hits,
            role=self._config.role,
            groups=[group for _, group in sorted(groups.items())],
            store_generated=self._config.store_generated,
            store_min_tokens=self._config.store_min_tokens,
            load_min_tokens=self._config.load_min_tokens,
        )
        for place in placed:
            links[place.label].begin(place.facts, place.shards)
        self.attachment.wait_verdict(self._config.connect_s)

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
        return {**super()._totals(), **counted, "servers_down": down}


class _Nothing:
    """Transfers of an engine without a cache."""

    def store(self, job: object) -> None:
        """Keep nothing."""

    def load(self, job: object) -> None:
        """Never called: the half is off."""

    def poll(self) -> Finished:
        """Nothing ends."""
        return Finished(frozenset(), {})

    def has_stores(self, request_id: str) -> bool:  # noqa: ARG002 - the port's signature
        """Nothing is read."""
        return False

    def cancel_stores(self, request_ids: Iterable[str], timeout_s: float) -> bool:  # noqa: ARG002 - the port's signature
        """Nothing is read."""
        return True

    def settle_stores(self, jobs: object, patience_s: float, timeout_s: float) -> bool:  # noqa: ARG002 - as above
        """Nothing is read."""
        return True

    def close(self, timeout_s: float) -> None:
        """Nothing runs."""


def layouts_of(engine: EngineFacts, tensors: Sequence[PagedTensor]) -> list[Layout]:
    """Cut the engine's tensors into the layouts of its groups.

    Raises:
        LayoutError: a tensor does not fit, or is in no group's memory.
    """
    named = {tensor.name: tensor for tensor in tensors}
    layouts = [layout_of([named.pop(n) for n in g.layers], engine.blocks, g.block_tokens) for g in engine.groups]
    known = {(p.storage, p.offset, p.stride) for layout in layouts for p in layout.planes}
    # Layers that use another one's memory are in no group.
    for tensor in named.values():
        for plane in layout_of([tensor], engine.blocks, 1).planes:
            if (plane.storage, plane.offset, plane.stride) not in known:
                raise LayoutError(f"{tensor.name} is in none of the engine's cache groups")
    return layouts


def describe_worker(engine: EngineFacts, layouts: Sequence[Layout], node: str, server: str) -> WorkerFacts:
    """Return what a worker tells the scheduler."""
    return WorkerFacts(
        namespace=engine.namespace,
        groups=tuple(
            GroupFacts(
                planes=layout.specs(),
                block_tokens=group.block_tokens,
                kind=group.kind,
                window_tokens=group.window_tokens,
                number=group.number,
            )
            for group, layout in zip(engine.groups, layouts, strict=True)
        ),
        hash_tokens=engine.hash_tokens,
        stage=engine.strategy.stage,
        stages=engine.strategy.pipeline,
        shard=engine.strategy.shard,
        readers=engine.strategy.readers,
        writer=engine.strategy.writer,
        node=node,
        server=server,
    )


def _disagreement(workers: Sequence[WorkerFacts]) -> str:
    """Say why these workers cannot be cached together; empty if they can."""
    if not workers:
        return "no worker said what it caches"
    for facts in workers:
        if facts.refusal:
            return facts.refusal
    stages = {facts.stage for facts in workers}
    if stages != set(range(workers[0].stages)):
        return f"{workers[0].stages} pipeline stages are expected, and {sorted(stages)} have a worker"
    kinds = {(g.number, g.kind, g.window_tokens, g.block_tokens) for facts in workers for g in facts.groups}
    if len(kinds) > len({number for number, *_ in kinds}):
        return "the ranks' caches differ in the kinds of their groups"
    return next(filter(None, (_stage_disagreement([f for f in workers if f.stage == s]) for s in sorted(stages))), "")


def _stage_disagreement(workers: Sequence[WorkerFacts]) -> str:
    first = workers[0]
    if any((f.namespace, f.groups) != (first.namespace, first.groups) for f in workers):
        return "the ranks' caches differ in layout or model"
    assert first.namespace is not None
    if {f.shard for f in workers} != set(range(first.namespace.shard_count)):
        return (
            f"{first.namespace.shard_count} shards are expected, and {sorted({f.shard for f in workers})} have a worker"
        )
    return ""
