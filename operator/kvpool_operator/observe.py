# SPDX-License-Identifier: Apache-2.0
"""Looks at what a pool owns, at its clients and its servers' statistics; nobody further in sees raw objects."""

import asyncio
import datetime as dt
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import aiohttp

from kvpool.model.whereabouts import bracketed
from kvpool_operator.cluster import CHILDREN, CONTROLLER_REVISIONS, EVENTS, NODES, PODS, Cluster
from kvpool_operator.desired import names
from kvpool_operator.errors import Absent
from kvpool_operator.observed import MISSED, OUT_OF_DATE, ClientPod, DaemonSetState, Owner, ServerPod, ServerStats
from kvpool_operator.spec import Pool
from kvpool_operator.wiring import Note, Skip, wanted_pool, wiring_mark

__all__ = ["clients", "daemon_set", "read_stats", "refusal", "servers", "unwatched"]

_GROUP_LABELS: Final = (
    ("kvpool.dev/group",),
    ("leaderworkerset.sigs.k8s.io/name", "leaderworkerset.sigs.k8s.io/group-index"),
    ("ray.io/cluster", "ray.io/group", "ray.io/worker-group-replica-name"),
    ("ray.io/cluster",),
)
"""Labels that name an engine over several pods, the most exact first."""
_NODE_READS: Final = 20
"""So many nodes are read one by one; more of them in one list."""
_STATS_PARALLEL: Final = 50
_STATS_S: Final = 2.0


async def daemon_set(cluster: Cluster, pool: Pool) -> DaemonSetState | None:
    """What its controller says; None before there is one."""
    try:
        found = await cluster.get(CHILDREN["DaemonSet"], pool.namespace, names.daemon_set(pool))
    except Absent:
        return None
    selector = f"{names.POOL_LABEL}={pool.name},{names.ROLE_LABEL}=server"
    revisions = await cluster.list(CONTROLLER_REVISIONS, pool.namespace, selector)
    ours = [r for r in revisions if _owned_by(r, found["metadata"]["uid"])]
    newest = max(ours, key=lambda r: r["revision"], default=None)
    status = found.get("status", {})
    return DaemonSetState(
        generation=found["metadata"]["generation"],
        observed_generation=status.get("observedGeneration", 0),
        desired=status.get("desiredNumberScheduled", 0),
        revision=newest["metadata"]["labels"]["controller-revision-hash"] if newest else "",
    )


async def servers(cluster: Cluster, pool: Pool, now: dt.datetime) -> tuple[ServerPod, ...]:
    """The pool's server pods, by node."""
    selector = f"{names.POOL_LABEL}={pool.name},{names.ROLE_LABEL}=server"
    pods = [_server(p, now) async for p in cluster.each(PODS, pool.namespace, selector)]
    lost = await _lost_nodes(cluster, {p.node for p in pods if not p.ready and p.node})
    return tuple(sorted((_seen_from(p, lost) for p in pods), key=lambda p: (p.node, p.name)))


async def refusal(cluster: Cluster, pool: Pool, state: DaemonSetState | None, servers: Collection[ServerPod]) -> str:
    """Why the DaemonSet's controller cannot make pods, in the API server's words; empty if it can.

    Asked only where no server is ready: a rollout misses some at each moment, and leaves thousands of events behind.
    """
    if state is None or not state.settled or len(servers) >= state.desired or any(p.ready for p in servers):
        return ""
    about = f"regarding.kind=DaemonSet,regarding.name={names.daemon_set(pool)},reason=FailedCreate"
    found = await cluster.list(EVENTS, pool.namespace, fields=about)
    newest = max(found, key=_when, default=None)
    return str(newest.get("note", "")) if newest else ""


def _when(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("deprecatedLastTimestamp") or event.get("eventTime") or "")


def unwatched(pool: Pool, watched: Collection[str]) -> tuple[str, ...]:
    """Namespaces that may use *pool* and into which this operator must not look; *watched* is empty if it may all."""
    return tuple(sorted(set(pool.spec.clients.allowed_namespaces) - set(watched))) if watched else ()


async def clients(
    cluster: Cluster, pool: Pool, watched: Collection[str] = (), server_key: str = ""
) -> tuple[ClientPod, ...]:
    """Running pods that named *pool*, admitted or not, as far as is *watched* (empty: everywhere)."""
    selector = f"{names.POOL_LABEL}={pool.name},{names.ROLE_LABEL}!=server"
    found: list[ClientPod] = []
    for namespace in sorted(watched) or ("",):
        pods = cluster.each(PODS, namespace, selector)
        found += [_client(p, pool, server_key) async for p in pods if _runs(p) and _asks_for(p, pool)]
    return tuple(sorted(found, key=lambda c: (c.namespace, c.name)))


async def read_stats(
    session: aiohttp.ClientSession, template: str, port: int, pods: Iterable[ServerPod]
) -> tuple[ServerStats, ...]:
    """Ask each server with an address; one that does not answer in time is left out."""
    gate = asyncio.Semaphore(_STATS_PARALLEL)

    async def ask(pod: ServerPod) -> ServerStats | None:
        async with gate:
            return await _ask(session, template.format(ip=bracketed(pod.ip), port=port), pod.node)

    answers = await asyncio.gather(*(ask(p) for p in pods if p.ip and p.reachable and not p.deleting))
    return tuple(a for a in answers if a is not None)


async def _ask(session: aiohttp.ClientSession, url: str, node: str) -> ServerStats | None:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=_STATS_S)) as answer:
            if answer.status != 200:  # noqa: PLR2004 - HTTP's own word for success
                return None
            return _stats(await answer.json(content_type=None), node)
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError):
        return None


def _stats(raw: Mapping[str, Any], node: str) -> ServerStats:
    """What a server says on its operations face; numbers go by their metrics' names."""
    series: Mapping[str, float] = raw["series"]
    return ServerStats(
        node=node,
        boot_id=str(raw["boot_id"]),
        version=str(raw["server_version"]),
        capacity_bytes=int(raw["l1_bytes"]),
        used_bytes=int(raw["l1_used_bytes"]),
        clients=int(raw["clients"]),
        lookups=_by_label(series, "kvpool_lookups_total", "reason"),
        prompt_tokens=int(_sum(series, "kvpool_lookup_tokens_total")),
        hit_tokens=int(_sum(series, "kvpool_hit_tokens_total")),
        stored_chunks=_by_label(series, "kvpool_store_chunks_total", "disposition").get("stored", 0),
        evicted_chunks=int(_sum(series, "kvpool_evicted_chunks_total")),
        asked_bytes=None if raw.get("l1_asked_bytes") is None else int(raw["l1_asked_bytes"]),
        wanted_bytes=int(raw.get("l1_wanted_bytes", 0)),
        mapped_bytes=int(raw.get("l1_mapped_bytes", 0)),
        refused=str(raw.get("config_refused", "")),
        live_digest=str(raw.get("live_digest", "")),
        gpus=None if raw.get("gpus") is None else int(raw["gpus"]),
        gpu_reason=str(raw.get("gpu_reason", "")),
    )


def _sum(series: Mapping[str, float], name: str) -> float:
    return sum(v for k, v in series.items() if k == name or k.startswith(name + "{"))


def _by_label(series: Mapping[str, float], name: str, label: str) -> dict[str, int]:
    """Values of ``name{label="x"}`` by x, without zeros."""
    start = f'{name}{{{label}="'
    return {k[len(start) :].partition('"')[0]: int(v) for k, v in series.items() if k.startswith(start) and v}


def _server(pod: Mapping[str, Any], now: dt.datetime) -> ServerPod:
    status, metadata = pod.get("status", {}), pod["metadata"]
    ready = _condition(status, "Ready")
    waiting, message = _why_waiting(status)
    since = ready.get("lastTransitionTime") or metadata["creationTimestamp"]
    return ServerPod(
        name=metadata["name"],
        uid=metadata["uid"],
        node=pod["spec"].get("nodeName") or _wanted_node(pod),
        ip=status.get("podIP", ""),
        revision=metadata.get("labels", {}).get("controller-revision-hash", ""),
        ready=ready.get("status") == "True",
        state_for_s=max(0.0, (now - dt.datetime.fromisoformat(since)).total_seconds()),
        deleting="deletionTimestamp" in metadata,
        waiting=waiting,
        message=message,
        restarts=sum(c.get("restartCount", 0) for c in status.get("containerStatuses", [])),
    )


def _why_waiting(status: Mapping[str, Any]) -> tuple[str, str]:
    """Why no container runs: the scheduler's word first, then the first container's that waits."""
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return scheduled.get("reason", "Unschedulable"), scheduled.get("message", "")
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") != "PodInitializing":
            return waiting.get("reason", ""), waiting.get("message", "")
    return "", ""


def _wanted_node(pod: Mapping[str, Any]) -> str:
    """The node that the DaemonSet controller made *pod* for, before it is bound."""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in required.get("nodeSelectorTerms", []):
        for wanted in term.get("matchFields", []):
            if wanted["key"] == "metadata.name":
                return str(wanted["values"][0])
    return ""


async def _lost_nodes(cluster: Cluster, suspects: set[str]) -> set[str]:
    """Those of *suspects* that the cluster has lost sight of."""
    if len(suspects) > _NODE_READS:
        return {n["metadata"]["name"] async for n in cluster.each(NODES) if _is_lost(n)} & suspects
    found = [n for n in [await _node(cluster, name) for name in sorted(suspects)] if n]
    return {n["metadata"]["name"] for n in found if _is_lost(n)}


def _is_lost(node: Mapping[str, Any]) -> bool:
    return _condition(node.get("status", {}), "Ready").get("status") != "True"


async def _node(cluster: Cluster, name: str) -> dict[str, Any] | None:
    try:
        node: dict[str, Any] = await cluster.get(NODES, "", name)
    except Absent:
        return None
    return node


def _seen_from(pod: ServerPod, lost: set[str]) -> ServerPod:
    if pod.node not in lost:
        return pod
    fields = {name: getattr(pod, name) for name in ServerPod.__dataclass_fields__}
    return ServerPod(**(fields | {"reachable": False}))


def _asks_for(pod: Mapping[str, Any], pool: Pool) -> bool:
    """True if *pod* means this very pool, and not one of the same name elsewhere."""
    return wanted_pool(pod, pod["metadata"]["namespace"]) == pool.key


def _client(pod: Mapping[str, Any], pool: Pool, server_key: str) -> ClientPod:
    metadata = pod["metadata"]
    labels, annotations = metadata.get("labels", {}), metadata.get("annotations") or {}
    keys = next((keys for keys in _GROUP_LABELS if all(k in labels for k in keys)), ())
    wired, reasons = _wiring(annotations, wiring_mark(pool, server_key, metadata["namespace"]))
    if not pool.admits(metadata["namespace"]):  # whatever it was wired to: no server lets it in
        wired, reasons = False, (str(Skip.NAMESPACE_NOT_ALLOWED),)
    return ClientPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        node=pod["spec"].get("nodeName", ""),
        group="/".join([metadata["namespace"], *(labels[k] for k in keys)]) if keys else "",
        wired=wired,
        uid=metadata.get("uid", ""),
        reasons=reasons,
        owner=_controller(metadata),
        made_at=metadata.get("creationTimestamp") or "",
        deleting="deletionTimestamp" in metadata,
    )


def _wiring(annotations: Mapping[str, str], mark: str) -> tuple[bool, tuple[str, ...]]:
    """Whether a pod is wired to what the pool is now, and the reasons that admission gave, or that it never saw it."""
    found = annotations.get(names.WIRED)
    if found is None:
        return False, (annotations.get(names.WIRING) or MISSED,)
    if found != mark:
        return False, (OUT_OF_DATE,)
    given = annotations.get(names.WIRING, "").split(",")
    return True, tuple(r for r in given if r and r not in ("Complete", Note.POOL_NOT_FOUND))


def _controller(metadata: Mapping[str, Any]) -> Owner | None:
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller"):
            return Owner(api_version=owner["apiVersion"], kind=owner["kind"], name=owner["name"], uid=owner["uid"])
    return None


def _runs(pod: Mapping[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def _condition(status: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status.get("conditions", []) if c["type"] == kind), {})


def _owned_by(item: Mapping[str, Any], uid: str) -> bool:
    return any(o["uid"] == uid for o in item["metadata"].get("ownerReferences", []))
