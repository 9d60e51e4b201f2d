# SPDX-License-Identifier: Apache-2.0
"""What a pool looks like in the cluster, as plain values: observe.py fills them, status.py and rollout.py judge."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "MISSED",
    "OUT_OF_DATE",
    "ClientPod",
    "DaemonSetState",
    "Observed",
    "Owner",
    "ServerPod",
    "ServerStats",
    "Window",
    "traffic",
]

MISSED: Final = "Missed"
"""Reason of a pod that admission never saw."""
OUT_OF_DATE: Final = "OutOfDate"
"""Reason of a pod that was wired to what its pool is no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPod:
    """One pod of the pool's DaemonSet."""

    name: str
    uid: str
    node: str
    ip: str = ""
    revision: str = ""
    """Hash of the pod template it was made from."""
    ready: bool = False
    state_for_s: float = 0.0
    """Seconds since it became ready, or since it stopped being so (or was made)."""
    deleting: bool = False
    reachable: bool = True
    """False once the cluster has lost sight of its node."""
    waiting: str = ""
    """Why its container does not run, in Kubernetes' word (CrashLoopBackOff), or Unschedulable."""
    message: str = ""
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The object that controls a pod."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPod:
    """One pod that names the pool."""

    namespace: str
    name: str
    node: str
    group: str = ""
    """Engine over several pods that it belongs to; empty for one of its own."""
    wired: bool = True
    uid: str = ""
    reasons: tuple[str, ...] = ()
    """Why it is not wired; or, wired, what is left to a person."""
    owner: Owner | None = None
    """The controller that makes it anew."""
    made_at: str = ""
    """When it was made (RFC 3339)."""
    deleting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSetState:
    """What the DaemonSet controller says."""

    generation: int
    observed_generation: int
    desired: int
    revision: str
    """Hash of the newest pod template."""

    @property
    def settled(self) -> bool:
        """True once the controller has seen the newest spec."""
        return self.observed_generation >= self.generation

    def is_served_by(self, pod: ServerPod) -> bool:
        """True if *pod* is made from the newest template, ready, and to stay."""
        return pod.ready and not pod.deleting and pod.revision == self.revision


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStats:
    """What one server says about itself; counters count from its start."""

    node: str
    boot_id: str
    version: str
    capacity_bytes: int = 0
    asked_bytes: int | None = None
    """Size of L1 that its configuration asks for; None if it does not say."""
    wanted_bytes: int = 0
    """What its capacity is on its way to."""
    mapped_bytes: int = 0
    """Memory that it does not use any more and that engines have still mapped."""
    refused: str = ""
    """Why it does not follow its configuration."""
    live_digest: str = ""
    """Name of the settings that it follows without a restart; empty if it does not say."""
    used_bytes: int = 0
    clients: int = 0
    lookups: Mapping[str, int] = field(default_factory=dict)
    """Lookups by why the found prefix ended where it did."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    stored_chunks: int = 0
    evicted_chunks: int = 0
    gpus: int | None = None
    """GPUs that it sees; None if it does not say."""
    gpu_reason: str = ""
    """What is wrong with them, in the server's word (NoGPUVisible); empty if nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened on all servers together within a stretch of time."""

    seconds: int = 0
    lookups: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    stored_chunks: int = 0
    evicted_chunks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that is known about one pool at one moment."""

    daemon_set: DaemonSetState | None = None
    servers: tuple[ServerPod, ...] = ()
    clients: tuple[ClientPod, ...] = ()
    """Of namespaces that the pool admits."""
    strangers: tuple[ClientPod, ...] = ()
    """Of others, which name the pool all the same."""
    not_evicted: str = ""
    """Why an unwired pod could not be evicted."""
    unwatched: tuple[str, ...] = ()
    """Namespaces of possible clients into which the operator must not look."""
    stats: tuple[ServerStats, ...] = ()
    window: Window = Window()
    gpu_mode: str = ""
    server_key: str = ""
    """The pool's public CURVE key."""
    runtime_class_missing: str = ""
    """The runtime class that the pool needs and the cluster lacks."""
    node_gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs of nodes, as their labels promise, where they do."""
    request_bytes: int = 0
    """Memory that a server asks of its node."""
    startup_s: float = 0.0
    """Time that a server may need to get ready; one that takes its time within it is no problem."""
    pods_refused: str = ""
    """Why pods cannot even be made, such as a namespace that allows less than they need."""
    live_digest: str = ""
    """Name of the settings that servers should follow."""
    error: str = ""
    """Why the spec or an object made from it was refused."""


def traffic(before: Iterable[ServerStats], after: Iterable[ServerStats], seconds: int) -> Window:
    """Sum what each server counted between two looks. One that started in between has counted from zero."""
    known = {s.boot_id: s for s in before}
    pairs = [(known.get(s.boot_id), s) for s in after]
    reasons = sorted({r for _, s in pairs for r in s.lookups})
    return Window(
        seconds=seconds,
        lookups={r: sum(s.lookups.get(r, 0) - (b.lookups.get(r, 0) if b else 0) for b, s in pairs) for r in reasons},
        prompt_tokens=sum(s.prompt_tokens - (b.prompt_tokens if b else 0) for b, s in pairs),
        hit_tokens=sum(s.hit_tokens - (b.hit_tokens if b else 0) for b, s in pairs),
        stored_chunks=sum(s.stored_chunks - (b.stored_chunks if b else 0) for b, s in pairs),
        evicted_chunks=sum(s.evicted_chunks - (b.evicted_chunks if b else 0) for b, s in pairs),
    )
