# SPDX-License-Identifier: Apache-2.0
"""A small model of the DaemonSet controller and its nodes, for tests of rollouts; time moves by calls alone."""

from dataclasses import dataclass, field, replace
from typing import Any

from tests.unit.operator.cases import with_identity

from kvpool_operator.observed import ClientPod, DaemonSetState, Observed, ServerPod
from kvpool_operator.spec import Pool, parse_pool

STARTUP_S = 60.0


def paced(**update: Any) -> Pool:
    """A pool with the Paced strategy."""
    spec = {"l1": {"size": "1Gi"}, "update": {"strategy": "Paced", "settle": "30s", **update}}
    return parse_pool(with_identity({"metadata": {"name": "a"}, "spec": spec}))


def server(node: str, revision: str = "old", **more: Any) -> ServerPod:
    """A healthy server of long standing, unless *more* says otherwise."""
    known = {"name": f"a-{node}", "uid": f"{node}-{revision}", "ready": True, "state_for_s": 3600.0}
    return ServerPod(node=node, revision=revision, **(known | more))


def seen(*servers: ServerPod, revision: str = "new", desired: int | None = None, **more: Any) -> Observed:
    """What an operator observes of *servers*."""
    count = len(servers) if desired is None else desired
    state = DaemonSetState(generation=2, observed_generation=2, desired=count, revision=revision)
    return Observed(daemon_set=state, servers=servers, **more)


@dataclass
class World:
    """Nodes with one server each. A deleted pod comes back with the newest revision on the next step."""

    nodes: list[str]
    revision: str = "r0"
    bad: set[str] = field(default_factory=set)
    """Revisions whose servers crash."""
    away: set[str] = field(default_factory=set)
    """Nodes out of sight."""
    clients: tuple[ClientPod, ...] = ()
    starting_s: float = 10.0

    def __post_init__(self) -> None:
        self.pods = {n: server(n, self.revision) for n in self.nodes}

    def observed(self) -> Observed:
        """What an operator sees now."""
        pods = [replace(p, reachable=n not in self.away) for n, p in self.pods.items()]
        return seen(*pods, revision=self.revision, desired=len(self.nodes), clients=self.clients)

    def delete(self, pods: tuple[ServerPod, ...]) -> None:
        """As the operator would."""
        for pod in pods:
            self.pods[pod.node] = replace(pod, deleting=True, ready=False, state_for_s=0.0)

    def step(self, seconds: float) -> None:
        """Let time pass."""
        for node, pod in list(self.pods.items()):
            if node not in self.away:
                self.pods[node] = self._later(pod, seconds)

    def _later(self, pod: ServerPod, seconds: float) -> ServerPod:
        if pod.deleting:
            return server(pod.node, self.revision, ready=False, state_for_s=0.0)
        age_s = pod.state_for_s + seconds
        if pod.ready or age_s < self.starting_s:
            return replace(pod, state_for_s=age_s)
        if pod.revision in self.bad:
            return replace(pod, state_for_s=age_s, waiting="CrashLoopBackOff")
        return replace(pod, ready=True, state_for_s=0.0)

    def unready(self) -> set[str]:
        """Nodes without a ready server, as far as anybody can see."""
        return {n for n, p in self.pods.items() if not p.ready and n not in self.away}

    def revisions(self) -> set[str]:
        """Revisions that run."""
        return {p.revision for p in self.pods.values()}
