# SPDX-License-Identifier: Apache-2.0
"""Pure: which servers a Paced update replaces next, or why none.

A replaced server starts cold (or, at best, is away for seconds), so: a few canaries first; a server that does not work
is replaced before one that does, so that two bad changes in a row hit the same few nodes; the nodes of one engine
together, since its hits are the minimum over them; and nothing further while anything new is unwell. Nodes out of sight
are left alone. To revert is to apply the former spec: its servers then count as up to date.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvpool_operator.observed import ClientPod, Observed, ServerPod, ServerStats
from kvpool_operator.spec.pool import Pool, Strategy, Update

__all__ = ["FAILED_WAITS", "Decision", "State", "decide"]

FAILED_WAITS: Final = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
"""Why a container may wait that does not pass by itself."""
_ENOUGH_LOOKUPS: Final = 20
"""Lookups after which a canary without a single hit is suspicious."""
_BY_TIME: Final = "; too little traffic to judge hits, so time and health decide"


class State(StrEnum):
    """Where an update stands."""

    UP_TO_DATE = "UpToDate"
    BY_KUBERNETES = "ByKubernetes"
    WAITING = "Waiting"
    CANARY = "Canary"
    PROGRESSING = "Progressing"
    SETTLING = "Settling"
    PAUSED = "Paused"
    STOPPED = "Stopped"
    NODES_AWAY = "NodesAway"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now."""

    state: State
    message: str = ""
    replace: tuple[ServerPod, ...] = ()
    """Pods to delete; the DaemonSet makes new ones."""


def decide(pool: Pool, observed: Observed, startup_s: float) -> Decision:
    """Say which servers to replace now; *startup_s* is the time that a server may need to get ready."""
    daemon_set = observed.daemon_set
    if daemon_set is None or not daemon_set.settled:
        return Decision(State.WAITING, "the DaemonSet controller has not seen the newest spec yet")
    old = [p for p in observed.servers if p.revision != daemon_set.revision]
    if not old:
        return Decision(State.UP_TO_DATE)
    if pool.spec.update.strategy is not Strategy.PACED:
        return Decision(State.BY_KUBERNETES, f"{len(old)} servers to update, strategy {pool.spec.update.strategy}")
    new = [p for p in observed.servers if p.revision == daemon_set.revision]
    if failed := sorted(p.node for p in new if _failed(p, startup_s)):
        return Decision(State.STOPPED, f"new server unwell on {_some(failed)}; correct or revert the spec")
    if pool.spec.update.paused:
        return Decision(State.PAUSED, f"{len(old)} servers to update")
    return _next(pool.spec.update, observed, old, new)


def _next(update: Update, observed: Observed, old: list[ServerPod], new: list[ServerPod]) -> Decision:
    assert observed.daemon_set is not None
    candidates = [p for p in old if p.reachable and not p.deleting]
    away = [p for p in old if not p.reachable]
    if not candidates and away and not any(p.deleting for p in old if p.reachable):
        return Decision(State.NODES_AWAY, f"{len(away)} servers to update on nodes out of sight")
    settling = [p for p in new if p.reachable and not (p.ready and p.state_for_s >= update.settle)]
    trying = len(new) < update.canary or (bool(settling) and len(new) <= update.canary)
    if trying:
        return _try_canaries(update, observed, candidates, new, settling)
    if silent := _without_hits(observed.stats, {p.node for p in new}):
        return Decision(State.SETTLING, f"servers with the new spec store but do not hit on {_some(silent)}")
    budget = _budget(update, observed.daemon_set.desired)
    chosen = _choose(candidates, observed, budget - _busy(observed, old, settling), budget)
    untried = _untried(observed.stats, {p.node for p in new if p.ready})
    return _told(chosen, settling, f"{len(old)} servers to update", _BY_TIME if untried else "")


def _try_canaries(
    update: Update, observed: Observed, candidates: list[ServerPod], new: list[ServerPod], settling: list[ServerPod]
) -> Decision:
    room = update.canary - len(new) - sum(p.deleting for p in observed.servers) - _not_made_yet(observed)
    chosen = tuple(_ordered(candidates, observed.clients)[: max(0, room)])
    if chosen:
        return Decision(State.CANARY, f"trying the new spec on {_some([p.node for p in chosen])}", chosen)
    return Decision(State.SETTLING, f"waiting until {len(settling) or 'the first'} new servers have settled")


def _told(chosen: tuple[ServerPod, ...], settling: list[ServerPod], text: str, how: str) -> Decision:
    if chosen:
        return Decision(State.PROGRESSING, text + how, chosen)
    return Decision(State.SETTLING, f"{text}, {len(settling)} settling{how}")


def _failed(pod: ServerPod, startup_s: float) -> bool:
    """True if a new server will not get well by waiting. One that has no place on its node yet is not at fault."""
    if pod.ready or pod.deleting or not pod.reachable or pod.waiting == "Unschedulable":
        return False
    return pod.waiting in FAILED_WAITS or pod.state_for_s > 2 * startup_s


def _without_hits(stats: Sequence[ServerStats], new: set[str]) -> list[str]:
    """New servers that store and are asked but never hit, while old ones do hit."""
    if not any(s.hit_tokens for s in stats if s.node not in new):
        return []
    return sorted(s.node for s in stats if s.node in new and s.stored_chunks and not s.hit_tokens and _asked_enough(s))


def _untried(stats: Sequence[ServerStats], new: set[str]) -> bool:
    """True if the hits of no server in *new* can be judged: they were asked too little, or nobody hits."""
    hits = any(s.hit_tokens for s in stats)
    return not any(s.node in new and hits and (s.hit_tokens or _asked_enough(s)) for s in stats)


def _asked_enough(stats: ServerStats) -> bool:
    return sum(stats.lookups.values()) >= _ENOUGH_LOOKUPS


def _budget(update: Update, desired: int) -> int:
    wanted = update.max_unavailable
    if isinstance(wanted, str):
        return max(1, math.ceil(desired * int(wanted.removesuffix("%")) / 100))
    return max(1, wanted)


def _not_made_yet(observed: Observed) -> int:
    """Servers between the end of an old pod and the start of a new one."""
    assert observed.daemon_set is not None
    return max(0, observed.daemon_set.desired - len(observed.servers))


def _busy(observed: Observed, old: list[ServerPod], settling: list[ServerPod]) -> int:
    """Servers that are away or not settled because of this update. Old ones that are unwell anyway do not count."""
    return len(settling) + _not_made_yet(observed) + sum(p.deleting and p.reachable for p in old)


def _choose(candidates: list[ServerPod], observed: Observed, room: int, budget: int) -> tuple[ServerPod, ...]:
    """Whole engines within *room*. An engine larger than the budget goes alone, if it is at most half of the pool."""
    if room <= 0:
        return ()
    assert observed.daemon_set is not None
    largest = max(budget, observed.daemon_set.desired // 2)
    chosen: list[ServerPod] = []
    for unit in _units(_ordered(candidates, observed.clients), observed.clients):
        together = unit if len(unit) <= largest else unit[:1]
        if len(together) > room - len(chosen) and (chosen or room < budget):
            break
        chosen += together
        if len(chosen) >= room:
            break
    return tuple(chosen)


def _ordered(pods: Iterable[ServerPod], clients: Sequence[ClientPod]) -> list[ServerPod]:
    """Those that do not work first, then those with the fewest engines."""
    engines: dict[str, int] = {}
    for client in clients:
        engines[client.node] = engines.get(client.node, 0) + 1
    return sorted(pods, key=lambda p: (p.ready, engines.get(p.node, 0), p.node))


def _units(ordered: list[ServerPod], clients: Sequence[ClientPod]) -> list[list[ServerPod]]:
    """Split into sets of servers that share an engine, in the order of each one's first server."""
    leader: dict[str, str] = {p.node: p.node for p in ordered}

    def find(node: str) -> str:
        while leader[node] != node:
            node = leader[node]
        return node

    first: dict[str, str] = {}
    for client in clients:
        if client.group and client.node in leader:
            other = first.setdefault(client.group, client.node)
            leader[find(client.node)] = find(other)
    units: dict[str, list[ServerPod]] = {}
    for pod in ordered:
        units.setdefault(find(pod.node), []).append(pod)
    return list(units.values())


def _some(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:3])
    return shown if len(nodes) <= 3 else f"{shown} and {len(nodes) - 3} more"  # noqa: PLR2004 - three is a few
