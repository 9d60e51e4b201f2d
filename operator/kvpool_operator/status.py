# SPDX-License-Identifier: Apache-2.0
"""Pure: what is observed of a pool, as its status. Equal input gives an equal status; no field is the current time."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvpool_operator.followed import l1_resized, settings_followed
from kvpool_operator.gpu_access import gpu_access, gpu_troubles
from kvpool_operator.observed import MISSED, Observed, ServerPod
from kvpool_operator.spec.pool import Pool
from kvpool_operator.spec.quantity import binary
from kvpool_operator.spec.report import (
    MAX_PROBLEM_NODES,
    MAX_UNWIRED_PODS,
    MAX_VERSIONS,
    Condition,
    PoolStatus,
    ProblemNode,
    Rollout,
    Servers,
    Traffic,
    UnwiredPod,
)
from kvpool_operator.verdict import Finding, hitting

__all__ = ["Progress", "status"]

_MESSAGE_LENGTH: Final = 1024


@dataclass(frozen=True, slots=True)
class Progress:
    """Where an update stands, as the rollout says."""

    state: str
    message: str = ""
    done: bool = True
    stopped: bool = False


def status(pool: Pool, seen: Observed, progress: Progress, before: PoolStatus, now_at: str) -> PoolStatus:
    """Judge *seen*. *now_at* (RFC 3339) marks conditions that flipped against *before*, and nothing else."""
    servers = _servers(seen)
    problems = _problems(seen)
    findings = _findings(pool, seen, servers, progress, len(problems), before)
    return PoolStatus(
        observed_generation=pool.generation,
        conditions=tuple(_condition(kind, f, pool.generation, before, now_at) for kind, f in findings.items()),
        servers=servers,
        capacity=binary(sum(s.capacity_bytes for s in seen.stats)) if seen.stats else "",
        used=binary(sum(s.used_bytes for s in seen.stats)) if seen.stats else "",
        hit_rate=_hit_rate(seen),
        traffic=_traffic(seen),
        clients=sum(s.clients for s in seen.stats) if seen.stats else None,
        gpu_mode=seen.gpu_mode,
        server_key=seen.server_key,
        versions=dict(sorted(Counter(s.version for s in seen.stats).most_common(MAX_VERSIONS))),
        rollout=Rollout(state=progress.state, message=progress.message[:512]),
        unwired_pod_count=sum(not c.wired for c in seen.clients),
        unwired_pods=_unwired(seen)[:MAX_UNWIRED_PODS],
        refused_pod_count=len(seen.strangers),
        problem_node_count=len(problems),
        problem_nodes=tuple(problems[:MAX_PROBLEM_NODES]),
    )


def _servers(seen: Observed) -> Servers:
    desired = seen.daemon_set.desired if seen.daemon_set else 0
    revision = seen.daemon_set.revision if seen.daemon_set else ""
    alive = [p for p in seen.servers if not p.deleting]
    ready = sum(p.ready and p.reachable for p in alive)
    return Servers(
        desired=desired,
        ready=ready,
        updated=sum(p.revision == revision for p in alive),
        unreachable=sum(not p.reachable for p in alive),
        summary=f"{ready}/{desired}",
    )


def _findings(
    pool: Pool, seen: Observed, servers: Servers, progress: Progress, problems: int, before: PoolStatus
) -> dict[str, Finding]:
    former = {c.type: c.status for c in before.conditions}
    found = {
        "ConfigValid": _config_valid(seen),
        "Available": _available(seen, servers),
        "Progressing": _progressing(seen, servers, progress),
        "Degraded": _degraded(servers, progress, problems),
        "GPUAccessReady": gpu_access(pool, seen),
        "L1Resized": l1_resized(pool, seen),
        "SettingsFollowed": settings_followed(seen, former.get("SettingsFollowed", "Unknown")),
        "ClientsWired": _clients_wired(seen),
        "Hitting": hitting(seen),
    }
    return {"Ready": _ready(found, seen, servers), **found}


def _config_valid(seen: Observed) -> Finding:
    if seen.error:
        return Finding("False", "Refused", seen.error)
    return Finding("True", "Accepted", "every object was accepted")


def _available(seen: Observed, servers: Servers) -> Finding:
    if servers.ready:
        return Finding("True", "ServersReady", f"{servers.ready} of {servers.desired} servers are ready")
    if seen.daemon_set is not None and seen.daemon_set.settled and not servers.desired:
        return Finding("False", "NoNodes", "no node matches placement; check nodeSelector, affinity and tolerations")
    if seen.pods_refused:
        return Finding("False", "PodsRefused", seen.pods_refused)
    return Finding("False", "NoServers", "no server is ready")


def _progressing(seen: Observed, servers: Servers, progress: Progress) -> Finding:
    if seen.daemon_set is None or not seen.daemon_set.settled:
        return Finding("True", "Applying", "the DaemonSet controller has not seen the newest spec yet")
    if not progress.done:
        return Finding("True", progress.state, progress.message)
    if servers.ready + servers.unreachable < servers.desired:
        return Finding("True", "Starting", f"{servers.desired - servers.ready} servers are not ready yet")
    return Finding("False", "UpToDate", "every server runs the newest spec")


def _degraded(servers: Servers, progress: Progress, problems: int) -> Finding:
    if progress.stopped:
        return Finding("True", "RolloutStopped", progress.message)
    if problems:
        return Finding("True", "ProblemNodes", f"{problems} of {servers.desired} nodes have a problem")
    return Finding("False", "AsExpected", "no node has a problem")


def _clients_wired(seen: Observed) -> Finding:
    """Pods of the namespaces that the pool admits decide; others can make it say more, and never say otherwise."""
    found = _wiring_of_clients(seen)
    return replace(found, message=f"{found.message}; {_refused(seen)}") if seen.strangers else found


def _wiring_of_clients(seen: Observed) -> Finding:
    unwired = _unwired(seen)
    if unwired:
        first = f"first {unwired[0].namespace}/{unwired[0].name}"
        text = f"{len(unwired)} pods opted in but are not wired ({_counts(p.reason for p in unwired)}), {first}"
        return Finding("False", "UnwiredPods", f"{text}; {seen.not_evicted}" if seen.not_evicted else text)
    if seen.unwatched:
        text = f"the operator does not watch {len(seen.unwatched)} namespaces that may use the pool, first "
        return Finding("Unknown", "NamespacesNotWatched", f"{text}{seen.unwatched[0]}; add them to its watchNamespaces")
    if not seen.clients:
        return Finding("Unknown", "NoClients", "no pod has opted in")
    noted = _counts(r for c in seen.clients for r in c.reasons)
    text = f"{len(seen.clients)} pods are wired"
    return Finding("True", "AllWired", f"{text}; left to a person: {noted}" if noted else text)


def _refused(seen: Observed) -> str:
    first = min((c.namespace, c.name) for c in seen.strangers)
    namespaces = len({c.namespace for c in seen.strangers})
    return (
        f"refused: {len(seen.strangers)} pods of {namespaces} namespaces that are not in clients.allowedNamespaces, "
        f"first {'/'.join(first)}"
    )


def _unwired(seen: Observed) -> tuple[UnwiredPod, ...]:
    found = [(c.namespace, c.name, next(iter(c.reasons), MISSED)) for c in seen.clients if not c.wired]
    return tuple(UnwiredPod(namespace=n, name=name, reason=reason) for n, name, reason in sorted(found))


def _counts(reasons: Iterable[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(Counter(reasons).items()))


def _ready(found: dict[str, Finding], seen: Observed, servers: Servers) -> Finding:
    """Ready means that the newest spec was seen, and every server in sight runs it and is ready."""
    for kind, wanted in (("ConfigValid", "True"), ("Available", "True"), ("Progressing", "False")):
        if found[kind].status != wanted:
            return Finding("False", found[kind].reason, found[kind].message)
    if servers.updated < servers.desired - servers.unreachable or seen.daemon_set is None:
        return Finding("False", "NotUpdated", f"{servers.updated} of {servers.desired} servers run the newest spec")
    return Finding("True", "AllServersReady", f"{servers.summary} servers are ready")


def _problems(seen: Observed) -> list[ProblemNode]:
    """Every node whose server is not as it should be, by name."""
    troubles = gpu_troubles(seen)
    found = [_problem(p, seen, troubles.get(p.node, "")) for p in seen.servers]
    return sorted((p for p in found if p is not None), key=lambda p: (p.node, p.reason))


def _problem(pod: ServerPod, seen: Observed, gpus: str) -> ProblemNode | None:
    if pod.reachable and not gpus and (pod.ready or _takes_its_time(pod, seen.startup_s)):
        return None
    reason = pod.waiting or ("Terminating" if pod.deleting else gpus or "NotReady")
    message = pod.message
    if not pod.reachable:
        reason, message = "Unreachable", "the cluster has lost sight of the node"
    elif reason == "Unschedulable":
        message = f"the server needs {binary(seen.request_bytes)} of memory; {message}"
    return ProblemNode(node=pod.node, reason=reason, message=message[:256])


def _takes_its_time(pod: ServerPod, startup_s: float) -> bool:
    """True while a server starts or ends as every server does."""
    return pod.waiting in ("", "ContainerCreating") and not pod.restarts and pod.state_for_s < startup_s


def _traffic(seen: Observed) -> Traffic | None:
    if not seen.stats:
        return None
    return Traffic(
        window_seconds=seen.window.seconds,
        lookups=sum(seen.window.lookups.values()),
        prompt_tokens=seen.window.prompt_tokens,
        hit_tokens=seen.window.hit_tokens,
        stored_chunks=seen.window.stored_chunks,
    )


def _hit_rate(seen: Observed) -> str:
    """Sum of hits by sum of prompts, never a mean of servers' rates."""
    asked = seen.window.prompt_tokens
    return f"{seen.window.hit_tokens / asked:.2f}" if asked else ""


def _condition(kind: str, finding: Finding, generation: int, before: PoolStatus, now_at: str) -> Condition:
    former = next((c for c in before.conditions if c.type == kind), None)
    flipped = former is None or former.status != finding.status
    since: str = now_at if flipped or former is None else former.last_transition_time
    value: Literal["True", "False", "Unknown"] = finding.status
    return Condition(
        type=kind,
        status=value,
        reason=finding.reason,
        message=finding.message[:_MESSAGE_LENGTH],
        observed_generation=generation,
        last_transition_time=since,
    )
