# SPDX-License-Identifier: Apache-2.0
"""One pass over one pool: live pool, desired objects, apply, observe, rollout, status."""

import asyncio
import datetime as dt
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvpool import config
from kvpool_operator import children, observe
from kvpool_operator.cluster import PODS, POOLS, Cluster
from kvpool_operator.desired import Facts, config_map, gpu, manifests, memory
from kvpool_operator.desired.provision import known_provision
from kvpool_operator.errors import Absent, Conflict, InvalidPool, OperatorError, Permanent, Retryable
from kvpool_operator.kept import Kept, Part
from kvpool_operator.keys import ensure_key, known_key
from kvpool_operator.observed import Observed, ServerPod, ServerStats, traffic
from kvpool_operator.pace import Pace, flips, news, stories, tally
from kvpool_operator.queue import Outcome
from kvpool_operator.repair import Repair
from kvpool_operator.rollout import Decision, State, decide
from kvpool_operator.settings import Settings
from kvpool_operator.spec import Condition, GpuMode, Pool, PoolStatus, Strategy, dump, parse_pool, parse_status
from kvpool_operator.status import Progress, status
from kvpool_operator.surroundings import Surroundings
from kvpool_operator.whereabouts import Whereabouts, complete, listed

__all__ = ["Fleet", "Key", "Reconciler", "StatsReader"]

Key = tuple[str, str]
"""Namespace and name of a pool."""

StatsReader = Callable[[int, tuple[ServerPod, ...]], Awaitable[tuple[ServerStats, ...]]]
"""Reads the statistics of servers: their operations port, their pods."""

_SOON_S: Final = 2.0
_KEEP_S: Final = 60.0
"""What no event was seen of is read again after this, or at each resync if those come more often."""


@dataclass(slots=True)
class _Memory:
    """What is remembered of a pool between passes; losing it costs one apply and one window."""

    uid: str
    pace: Pace
    kept: Kept
    stats: tuple[ServerStats, ...] = ()
    before: tuple[ServerStats, ...] = ()
    read_s: float = float("-inf")
    window_s: int = 0
    resynced_s: float = float("-inf")
    key_checked_s: float = float("-inf")
    server_key: str = ""
    places: Whereabouts = field(default_factory=Whereabouts)
    ready: str = "Unknown"
    unwired: int = 0


@dataclass(frozen=True, slots=True)
class Fleet:
    """All pools together, as their last passes found them."""

    pools: Mapping[str, int]
    """How many, by what their condition Ready says."""
    unwired: int
    """Pods that opted in and are not wired."""


@dataclass(slots=True)
class Reconciler:
    """Brings pools to their desired state. One event loop; one pass over a key at a time."""

    cluster: Cluster
    settings: Settings
    surroundings: Surroundings
    read_stats: StatsReader
    clock: Callable[[], float]
    wall: Callable[[], dt.datetime]
    report: Callable[[str, Key, str], None] = lambda _event, _key, _text: None
    """Told of what a person may want to know."""
    announce: Callable[[Pool, Condition], Awaitable[None]] | None = None
    """Told of each condition that flipped."""
    passed: Callable[[str, float], None] = lambda _result, _seconds: None
    """Told how each pass ended (one of metrics.PASSES), and how long it took."""
    repair: Repair | None = None
    """Looks after pods that are not wired."""
    _applied: children.Applied = field(default_factory=children.Applied)
    _memories: dict[Key, _Memory] = field(default_factory=dict)

    async def __call__(self, key: Key) -> Outcome:
        """One pass; every failure becomes an outcome."""
        begun_s = self.clock()
        result, outcome = await self._guarded(key)
        self.passed(result, self.clock() - begun_s)
        return outcome

    async def _guarded(self, key: Key) -> tuple[str, Outcome]:
        try:
            return await self._pass(key)
        except Absent as e:
            self.report("pool.waits", key, str(e))
            return "failed", Outcome(failed=True)
        except Retryable as e:
            self.report("pool.retried", key, str(e))
            return "retried", Outcome(failed=True, after_s=e.after_s)
        except OperatorError as e:
            self.report("pool.failed", key, str(e))
            return "failed", Outcome(failed=True)

    def changed(self, key: Key, part: Part) -> None:
        """Something of *part* of a pool changed: its next pass reads it."""
        if found := self._memories.get(key):
            found.kept.changed(part)

    def keys(self) -> list[Key]:
        """Pools that are remembered."""
        return list(self._memories)

    def fleet(self) -> Fleet:
        """What the last passes over all pools found."""
        known = self._memories.values()
        return Fleet(Counter(m.ready for m in known), sum(m.unwired for m in known))

    async def _pass(self, key: Key) -> tuple[str, Outcome]:
        try:
            body = await self.cluster.get(POOLS, *key)
        except Absent:
            body = None
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._forget(key)
            return "gone", Outcome(forget=True)
        try:
            pool = parse_pool(body)
        except InvalidPool as e:
            return "invalid", await self._refused(key, body, str(e))
        return await self._work(pool, body)

    async def _work(self, pool: Pool, body: dict[str, Any]) -> tuple[str, Outcome]:
        memory_of = self._remember(pool)
        memory_of.kept.begin(pool, self.clock())
        facts, error = await self._settle(pool, memory_of)
        seen = await self._observe(pool, facts, memory_of, error)
        await self._tell_where(pool, facts, seen, memory_of)
        decision = decide(pool, seen, memory.startup_s(pool))
        await self._replace(pool, decision, memory_of.kept)
        written = await self._write_status(pool, body, seen, decision, memory_of)
        return "failed" if error else "ok", self._outcome(decision, seen, error=error, written=written)

    async def _places(self, pool: Pool, memory_of: _Memory) -> str:
        """The list of servers as it was last written; at a first look at this pool as it is."""
        if memory_of.places.text is None:
            await _read_servers(self.cluster, pool, memory_of.kept, self.clock(), self.wall())
            text = listed(memory_of.kept.servers, pool.spec.network.port)
            memory_of.places.follow(text, self.clock(), all_there=False)
        return memory_of.places.text or ""

    async def _tell_where(self, pool: Pool, facts: Facts, seen: Observed, memory_of: _Memory) -> None:
        """Write the list of servers down if it is time to."""
        text = listed(seen.servers, pool.spec.network.port)
        all_there = complete(seen.daemon_set, seen.servers)
        if memory_of.places.follow(text, self.clock(), all_there=all_there) and config_map.serves_tcp(pool):
            made = config_map.server_config_map(pool, replace(facts, servers=text))
            self._applied.note(pool.uid, made, await self.cluster.apply(made))
            memory_of.kept.facts = memory_of.kept.facts and replace(facts, servers=text)

    async def _settle(self, pool: Pool, memory_of: _Memory) -> tuple[Facts, str]:
        """Bring what the pool owns to what it should be, unless nothing can have changed since; an error, too."""
        kept, begun_s = memory_of.kept, self.clock()
        if kept.facts is not None and Part.CHILDREN not in kept.unread:
            facts = await self.surroundings.facts(kept.facts.server_key)
            known = replace(facts, provision=kept.facts.provision, servers=memory_of.places.text or "")
            if known == kept.facts:
                return known, ""
        former_key = kept.facts.server_key if kept.facts else ""
        kept.facts = None
        live = await children.find(self.cluster, pool)
        key = await self._key(pool, known_key(live.values()) or memory_of.server_key, memory_of)
        if key != former_key:
            kept.need(Part.CLIENTS)  # they were wired to another one
        places = await self._places(pool, memory_of)
        facts = replace(await self.surroundings.facts(key), provision=known_provision(live.values()), servers=places)
        kept.need(Part.SERVERS)  # what their controller says of the objects that are applied now
        try:
            await children.settle(self.cluster, pool, manifests(pool, facts), live, self._applied)
        except Permanent as e:
            return facts, str(e)
        kept.facts = facts
        kept.read(Part.CHILDREN, begun_s)
        return facts, ""

    def _remember(self, pool: Pool) -> _Memory:
        """What is known of this very pool.

        A resync applies nothing by itself: live objects are compared whenever one was seen to change, and at least each
        minute, so what differs is seen anyway, and a pool at rest costs no write.
        """
        found = self._memories.get(pool.key)
        if found is None or found.uid != pool.uid:
            kept = Kept(min(_KEEP_S, self.settings.resync_s))
            pace = Pace(self.settings.status_gap_s)
            found = self._memories[pool.key] = _Memory(pool.uid, pace, kept, resynced_s=self.clock())
        if self.clock() - found.resynced_s >= self.settings.resync_s:
            found.resynced_s = self.clock()
        return found

    async def _key(self, pool: Pool, known: str, memory_of: _Memory) -> str:
        """The public key; whether its Secret is still there is asked once per resync."""
        if not config_map.serves_tcp(pool):
            return ""
        if not known or memory_of.key_checked_s < memory_of.resynced_s:
            known = await ensure_key(self.cluster, pool, known)
            memory_of.key_checked_s = self.clock()
        memory_of.server_key = known
        return known

    def _forget(self, key: Key) -> None:
        found = self._memories.pop(key, None)
        if found is not None:
            self._applied.forget(found.uid)
            if self.repair is not None:
                self.repair.forget(found.uid)

    async def _observe(self, pool: Pool, facts: Facts, memory_of: _Memory, error: str) -> Observed:
        watched, kept = self.settings.watch_namespaces, memory_of.kept
        await asyncio.gather(
            _read_servers(self.cluster, pool, kept, self.clock(), self.wall()),
            _read_clients(self.cluster, pool, kept, self.clock(), watched, facts.server_key),
        )
        servers, everybody, state = kept.servers_at(self.clock()), kept.clients, kept.state
        clients = tuple(c for c in everybody if pool.admits(c.namespace))
        strangers = tuple(c for c in everybody if not pool.admits(c.namespace))
        await self._refresh_stats(pool, servers, memory_of)
        mode = gpu.mode_in_use(pool, facts)
        wanted_class = gpu.runtime_class(pool)
        missing = mode is GpuMode.RUNTIME_CLASS and wanted_class not in facts.runtime_classes
        return Observed(
            daemon_set=state,
            servers=servers,
            clients=clients,
            strangers=strangers,
            not_evicted=await self.repair(pool, clients + strangers) if self.repair is not None else "",
            unwatched=observe.unwatched(pool, watched),
            stats=memory_of.stats,
            window=traffic(memory_of.before, memory_of.stats, memory_of.window_s),
            gpu_mode=str(mode),
            server_key=facts.server_key if config_map.serves_tcp(pool) else "",
            runtime_class_missing=wanted_class if missing else "",
            node_gpus=await self.surroundings.node_gpus() if gpu.has_gpus(pool) else {},
            request_bytes=memory.request_bytes(pool),
            startup_s=memory.startup_s(pool),
            live_digest=config.live_digest(config_map.server_config(pool, facts)),
            pods_refused=await observe.refusal(self.cluster, pool, state, servers),
            error=error,
        )

    async def _refresh_stats(self, pool: Pool, servers: tuple[ServerPod, ...], memory_of: _Memory) -> None:
        """Read the statistics once per period; the window is the time between the last two readings."""
        now_s = self.clock()
        if now_s - memory_of.read_s < self.settings.stats_s:
            return
        fresh = await self.read_stats(pool.spec.network.operations_port, servers)
        first = memory_of.read_s == float("-inf")
        memory_of.before = fresh if first else memory_of.stats
        memory_of.window_s = 0 if first else round(self.settings.stats_s)
        memory_of.stats, memory_of.read_s = fresh, now_s

    async def _replace(self, pool: Pool, decision: Decision, kept: Kept) -> None:
        if decision.replace:
            self.report("servers.replaced", pool.key, f"{decision.state}: {decision.message}")
        for pod in decision.replace:
            kept.changed(Part.SERVERS)
            await self.cluster.delete(PODS, pool.namespace, pod.name, pod.uid)

    async def _refused(self, key: Key, body: dict[str, Any], error: str) -> Outcome:
        """The spec cannot even be read: nothing is touched but the status."""
        before = parse_status(body)
        stand_in = parse_pool({**body, "spec": {"l1": {"size": "64Mi"}}})
        made = status(stand_in, Observed(error=error), Progress(State.WAITING), before, _stamp(self.wall()))
        if made != before:
            await self.cluster.apply_status(*key, dump(made))
        return Outcome()

    async def _write_status(
        self, pool: Pool, body: dict[str, Any], seen: Observed, decision: Decision, memory_of: _Memory
    ) -> bool:
        """Write the status if it differs; False if it differs but was written too recently."""
        before = parse_status(body)
        made = status(pool, seen, _progress(pool, decision), before, _stamp(self.wall()))
        memory_of.ready = next(c.status for c in made.conditions if c.type == "Ready")
        memory_of.unwired = sum(not c.wired for c in seen.clients)
        new, counted = news(before, made), tally(made)
        if made == before:
            if counted is not None:
                memory_of.pace.rest(self.clock())
            return True
        steady = memory_of.pace.steady(self.clock(), counted)
        final = steady and counted is not None and counted != tally(before)
        if not memory_of.pace.due(self.clock(), new=new, final=final):
            return False
        try:
            await self.cluster.apply_status(*pool.key, dump(made))
        except (Absent, Conflict):
            return False
        memory_of.pace.written(self.clock(), new=new)
        await self._tell(pool, before, made)
        return True

    async def _tell(self, pool: Pool, before: PoolStatus, made: PoolStatus) -> None:
        """One report for each condition that flipped, and an Event where it is not said by another one's."""
        flipped = flips(before, made)
        for condition in flipped:
            text = f"{condition.type}={condition.status} {condition.reason}: {condition.message}"
            self.report("condition.changed", pool.key, text)
        if self.announce is not None:
            for condition in stories(flipped):
                await self.announce(pool, condition)

    def _outcome(self, decision: Decision, seen: Observed, *, error: str, written: bool) -> Outcome:
        if error:
            return Outcome(after_s=self.settings.stats_s)
        busy = decision.state not in (State.UP_TO_DATE, State.STOPPED, State.PAUSED, State.BY_KUBERNETES)
        unready = seen.daemon_set is None or not seen.daemon_set.settled
        if busy or unready:
            return Outcome(after_s=_SOON_S)
        return Outcome(after_s=self.settings.stats_s if written else self.settings.status_gap_s)


async def _read_servers(cluster: Cluster, pool: Pool, kept: Kept, now_s: float, now: dt.datetime) -> None:
    if Part.SERVERS in kept.unread:
        kept.servers = await observe.servers(cluster, pool, now)
        kept.state = await observe.daemon_set(cluster, pool)  # after its pods, or new ones would look outdated
        kept.read(Part.SERVERS, now_s)


async def _read_clients(
    cluster: Cluster, pool: Pool, kept: Kept, now_s: float, watched: Collection[str], server_key: str
) -> None:
    if Part.CLIENTS in kept.unread:
        kept.clients = await observe.clients(cluster, pool, watched, server_key)
        kept.read(Part.CLIENTS, now_s)


def _progress(pool: Pool, decision: Decision) -> Progress:
    """With OnDelete nothing goes on until somebody deletes a pod."""
    waits = decision.state is State.BY_KUBERNETES and pool.spec.update.strategy is Strategy.ON_DELETE
    done = waits or decision.state in (State.UP_TO_DATE, State.NODES_AWAY)
    return Progress(str(decision.state), decision.message, done, decision.state is State.STOPPED)


def _stamp(now: dt.datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
