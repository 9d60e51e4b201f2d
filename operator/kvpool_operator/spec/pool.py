# SPDX-License-Identifier: Apache-2.0
"""The spec of a KVCachePool, declared once: the schema comes from these types, and the operator reads with them."""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from kvpool_operator.spec.placement import Placement
from kvpool_operator.spec.quantity import Duration, Size
from kvpool_operator.spec.schema_types import KubeName, LabelKey, LabelValue, Rule, Section

__all__ = [
    "L1",
    "Clients",
    "EnvVar",
    "GpuAccess",
    "GpuMode",
    "Ipc",
    "IpcMode",
    "Load",
    "Monitoring",
    "MoverPorts",
    "NamespaceTenant",
    "Network",
    "Payload",
    "PodMetadata",
    "Pool",
    "PoolSpec",
    "PullSecret",
    "Quota",
    "ResourceList",
    "Resources",
    "Store",
    "Strategy",
    "Tenants",
    "Transfer",
    "Update",
]


class GpuMode(StrEnum):
    """How servers see GPUs without claiming them."""

    AUTO = "Auto"
    RUNTIME_CLASS = "RuntimeClass"
    NRI = "NRI"
    DRA = "DRA"
    PRIVILEGED = "Privileged"
    NONE = "None"


class IpcMode(StrEnum):
    """What servers and engines of a node share."""

    ISOLATED = "Isolated"
    HOST_PATH_SOCKET = "HostPathSocket"


class Strategy(StrEnum):
    """How a change reaches the servers."""

    PACED = "Paced"
    ROLLING_UPDATE = "RollingUpdate"
    ON_DELETE = "OnDelete"


class L1(Section, frozen=True, kw_only=True):
    """Host memory of each server."""

    size: Annotated[Size, Meta(description="Host memory of each server, such as 64Gi.")]
    eviction_policy: Annotated[Literal["LRU"], Meta(description="Which chunks leave first.")] = "LRU"
    high_watermark: Annotated[
        int, Meta(ge=1, le=100, description="Percent of slots in use above which the background evicts.")
    ] = 97
    low_watermark: Annotated[
        int, Meta(ge=1, le=100, description="Percent of slots in use that the background evicts down to.")
    ] = 94
    persistence: Annotated[
        Literal["Container", "Node"],
        Meta(
            description="Container: the cache outlives a restarted container. Node: a replaced pod, too "
            "(needs host folders, so a namespace at the Privileged level)."
        ),
    ] = "Container"

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "quantity(string(self.size)).compareTo(quantity('64Mi')) >= 0",
            "size: at least 64Mi",
            ".size",
        ),
        Rule("quantity(string(self.size)).compareTo(quantity('64Ti')) <= 0", "size: at most 64Ti", ".size"),
        Rule(
            "self.lowWatermark <= self.highWatermark",
            "lowWatermark: must not be above highWatermark",
            ".lowWatermark",
        ),
    )


class Store(Section, frozen=True, kw_only=True):
    """What is worth storing."""

    generated_tokens: Annotated[bool, Meta(description="Store generated tokens, too.")] = False
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 24, description="Prompts with fewer tokens are not stored.")] = 0


class Load(Section, frozen=True, kw_only=True):
    """What is worth loading."""

    min_tokens: Annotated[
        int, Meta(ge=0, le=1 << 24, description="Hits that bring fewer tokens are computed instead of loaded.")
    ] = 0
    time_budget: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="Percent of the time that computing would take which a load may be expected to take; hits that "
            "are expected to take longer are computed. 0 loads every hit.",
        ),
    ] = 100


class NamespaceTenant(Section, frozen=True, kw_only=True):
    """A namespace whose pods belong to another tenant than the one of its name."""

    namespace: KubeName
    tenant: Annotated[str, Meta(min_length=1, max_length=128)]


class Quota(Section, frozen=True, kw_only=True):
    """A part of L1 that one tenant has for itself."""

    tenant: Annotated[str, Meta(min_length=1, max_length=128)]
    l1_percent: Annotated[
        int,
        Meta(ge=1, le=100, description="Percent of each server's L1: at most that, and nobody else's stores take it."),
    ]


class Tenants(Section, frozen=True, kw_only=True):
    """Who shares chunks with whom. A namespace is its own tenant where nothing else is said."""

    default: Annotated[
        str, Meta(min_length=1, max_length=128, description="Tenant of clients whose identity names no namespace.")
    ] = "default"
    by_namespace: Annotated[
        tuple[NamespaceTenant, ...],
        Meta(
            max_length=256,
            description="Namespaces that belong to another tenant; several may share one.",
            extra={"map_keys": ("namespace",)},
        ),
    ] = ()
    quotas: Annotated[
        tuple[Quota, ...],
        Meta(
            max_length=64,
            description="Tenants with a part of L1 of their own; all others share the rest.",
            extra={"map_keys": ("tenant",)},
        ),
    ] = ()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.quotas.map(q, q.l1Percent).sum() <= 100",
            "quotas: l1Percent must be at most 100 in sum",
            ".quotas",
        ),
    )


class GpuAccess(Section, frozen=True, kw_only=True):
    """How servers see GPUs without claiming them."""

    mode: Annotated[
        GpuMode,
        Meta(description="Auto takes the RuntimeClass if there is one, else the NRI annotation. None: no GPUs."),
    ] = GpuMode.AUTO
    runtime_class_name: Annotated[KubeName | None, Meta(description="Default: nvidia.")] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.runtimeClassName) || self.mode in ['Auto', 'RuntimeClass']",
            "runtimeClassName: only with mode Auto or RuntimeClass",
            ".runtimeClassName",
        ),
    )


class Ipc(Section, frozen=True, kw_only=True):
    """What servers and engines of a node share."""

    mode: Annotated[
        IpcMode,
        Meta(
            description="Isolated: nothing, they meet over TCP. HostPathSocket: a host folder with a Unix socket "
            "(needs namespaces at the Privileged level)."
        ),
    ] = IpcMode.ISOLATED


class Transfer(Section, frozen=True, kw_only=True):
    """How bytes move."""

    mode: Annotated[
        Literal["Auto", "Ring", "ClientMoved", "Streamed"],
        Meta(description="Auto: the fastest that both sides can do. Another one: that alone, or no cache."),
    ] = "Auto"


class MoverPorts(Section, frozen=True, kw_only=True):
    """TCP ports on which movers meet engines that have a ring of device memory and no socket, one for each of them."""

    first: Annotated[int, Meta(ge=1024, le=65535, description="The first of them.")] = 7430
    count: Annotated[
        int, Meta(ge=1, le=64, description="How many: at least one for each GPU of a node. An engine beyond streams.")
    ] = 16


class Network(Section, frozen=True, kw_only=True):
    """Who may connect, and where."""

    port: Annotated[int, Meta(ge=1024, le=65535, description="TCP port of the servers.")] = 7410
    operations_port: Annotated[
        int, Meta(ge=1024, le=65535, description="HTTP port of probes, metrics and statistics.")
    ] = 7411
    bulk_port: Annotated[
        int, Meta(ge=1024, le=65535, description="TCP port of unencrypted bulk connections (encryption Control).")
    ] = 7412
    mover_ports: MoverPorts = MoverPorts()
    auth: Annotated[
        Literal["ServiceAccountToken", "None"],
        Meta(description="How clients prove who they are. None: only over the socket, which is then the only door."),
    ] = "ServiceAccountToken"
    encryption: Annotated[
        Literal["Control", "All"],
        Meta(
            description="What of the TCP traffic is encrypted. Control: all but bulk bytes and the words between an "
            "engine and its mover. All: all, so without the socket bytes are streamed and no ring is used."
        ),
    ] = "Control"
    policy: Annotated[bool, Meta(description="Make a NetworkPolicy for the servers.")] = True

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.port != self.operationsPort && self.port != self.bulkPort && self.operationsPort != self.bulkPort",
            "port, operationsPort and bulkPort: must differ from each other",
            ".port",
        ),
        Rule(
            "self.moverPorts.first + self.moverPorts.count <= 65536",
            "moverPorts: must end at 65535",
            ".moverPorts",
        ),
        Rule(
            "[self.port, self.operationsPort, self.bulkPort]"
            ".all(p, p < self.moverPorts.first || p >= self.moverPorts.first + self.moverPorts.count)",
            "moverPorts: must not hold port, operationsPort or bulkPort",
            ".moverPorts",
        ),
    )


class Payload(Section, frozen=True, kw_only=True):
    """Brings the connector into images of vLLM that do not have it."""

    image: Annotated[
        Annotated[str, Meta(min_length=1, max_length=512)] | None,
        Meta(description="Payload image; not given takes the operator's."),
    ] = None
    mode: Annotated[
        Literal["InitContainer", "ImageVolume"],
        Meta(description="ImageVolume copies nothing; it needs Kubernetes 1.36, or 1.34 with that gate."),
    ] = "InitContainer"
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"


class Clients(Section, frozen=True, kw_only=True):
    """Whose pods may use the pool, and what wiring does to them."""

    allowed_namespaces: Annotated[
        tuple[KubeName, ...],
        Meta(max_length=256, description="Namespaces besides the pool's own.", extra={"set": True}),
    ] = ()
    load_failure_policy: Annotated[
        Literal["Recompute", "Fail"],
        Meta(description="What engines do with a request whose load failed: compute it, or end it with an error."),
    ] = "Recompute"
    payload: Annotated[
        Payload | None, Meta(description="Bring the connector with each pod; not given: images have it already.")
    ] = None
    rewire_unwired: Annotated[
        bool,
        Meta(
            description="Evict pods that opted in but are not wired, a few at a time, if a controller makes them anew."
        ),
    ] = False


class Update(Section, frozen=True, kw_only=True):
    """How a change reaches the servers."""

    strategy: Annotated[
        Strategy,
        Meta(
            description="RollingUpdate: the DaemonSet's own. OnDelete: when somebody deletes a pod. Paced: the "
            "operator replaces pods, canary first, groups together, and stops when something fails."
        ),
    ] = Strategy.ROLLING_UPDATE
    max_unavailable: Annotated[
        int | str,
        Meta(
            description="Servers that may be away at a time: a number or a percentage.",
            extra={"int_or_string": True},
        ),
    ] = 1
    canary: Annotated[int, Meta(ge=0, le=100, description="Servers that a Paced update tries first.")] = 1
    settle: Annotated[
        Duration, Meta(description="How long a new server must stay healthy before a Paced update goes on.")
    ] = Duration(60)
    paused: Annotated[bool, Meta(description="A Paced update replaces no further pods.")] = False

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "type(self.maxUnavailable) == int ? self.maxUnavailable >= 1 : "
            "string(self.maxUnavailable).matches('^([1-9][0-9]?|100)%$')",
            "maxUnavailable: a number above zero, or 1% to 100%",
            ".maxUnavailable",
        ),
    )


class ResourceList(Section, frozen=True, kw_only=True):
    """Amounts of what a container uses."""

    cpu: Annotated[str, Meta(max_length=16, pattern=r"^[0-9]+(\.[0-9]+|m)?$")] | None = None
    memory: Size | None = None


class Resources(Section, frozen=True, kw_only=True):
    """Instead of what the operator computes; an amount not given here keeps its computed value."""

    requests: ResourceList = ResourceList()
    limits: ResourceList = ResourceList()


class PodMetadata(Section, frozen=True, kw_only=True):
    """What is put on server pods besides the operator's own."""

    labels: Annotated[dict[LabelKey, LabelValue], Meta(max_length=32)] = msgspec.field(default_factory=dict)
    annotations: Annotated[dict[LabelKey, Annotated[str, Meta(max_length=4096)]], Meta(max_length=32)] = msgspec.field(
        default_factory=dict
    )

    rules: ClassVar[tuple[Rule, ...]] = tuple(
        Rule(f"self.{what}.all(k, !k.startsWith('kvpool.dev/'))", f"{what}: kvpool.dev/ is the operator's", f".{what}")
        for what in ("labels", "annotations")
    )


class EnvVar(Section, frozen=True, kw_only=True):
    """One variable of the server's environment."""

    name: Annotated[str, Meta(min_length=1, max_length=253, pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
    value: Annotated[str, Meta(max_length=4096)] = ""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!self.name.startsWith('KVPOOL_') && !self.name.startsWith('NVIDIA_')",
            "name: KVPOOL_ and NVIDIA_ are the operator's; set the pool's field instead",
            ".name",
        ),
    )


class PullSecret(Section, frozen=True, kw_only=True):
    """Name of a Secret in the pool's namespace that the kubelet pulls images with."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]


class Monitoring(Section, frozen=True, kw_only=True):
    """Objects for Prometheus' operator, made where their kinds exist."""

    pod_monitor: Annotated[bool, Meta(description="Make a PodMonitor.")] = True
    rules_: Annotated[bool, Meta(description="Make alert rules.")] = msgspec.field(default=True, name="rules")
    labels: Annotated[
        dict[LabelKey, LabelValue],
        Meta(max_length=32, description="Labels on both, by which Prometheus selects them (often `release`)."),
    ] = msgspec.field(default_factory=dict)
    interval: Annotated[Duration, Meta(description="Time between scrapes.")] = Duration(30)
    namespace: Annotated[KubeName, Meta(description="Namespace that Prometheus runs in.")] = "monitoring"


class PoolSpec(Section, frozen=True, kw_only=True):
    """What a pool should be."""

    l1: L1
    chunk_tokens: Annotated[
        int, Meta(ge=16, le=65536, description="Tokens of one chunk; immutable: another value needs a new pool.")
    ] = 256
    store: Store = Store()
    load: Load = Load()
    tenants: Tenants = Tenants()
    gpu_access: GpuAccess = GpuAccess()
    ipc: Ipc = Ipc()
    transfer: Transfer = Transfer()
    network: Network = Network()
    clients: Clients = Clients()
    update: Update = Update()
    placement: Placement = Placement()
    image: Annotated[
        Annotated[str, Meta(min_length=1, max_length=512)] | None,
        Meta(description="Server image; not given takes the operator's."),
    ] = None
    image_pull_secrets: Annotated[
        tuple[PullSecret, ...], Meta(max_length=16, extra={"map_keys": ("name",)}, description="Secrets to pull with.")
    ] = ()
    resources: Resources = Resources()
    pod_metadata: PodMetadata = PodMetadata()
    env: Annotated[
        tuple[EnvVar, ...], Meta(max_length=64, extra={"map_keys": ("name",)}, description="More environment.")
    ] = ()
    log_level: Literal["Debug", "Info", "Warning", "Error"] = "Info"
    monitoring: Monitoring = Monitoring()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.chunkTokens == oldSelf.chunkTokens",
            "chunkTokens: immutable, since stored chunks would never be found again; make a new pool",
            ".chunkTokens",
        ),
        Rule(
            "self.network.auth != 'None' || self.ipc.mode == 'HostPathSocket'",
            "network.auth: None only with ipc.mode HostPathSocket",
            ".network.auth",
        ),
        Rule(
            "self.transfer.mode != 'ClientMoved' || self.ipc.mode == 'HostPathSocket'",
            "transfer.mode: ClientMoved needs ipc.mode HostPathSocket",
            ".transfer.mode",
        ),
        Rule(
            "self.transfer.mode != 'Ring' || self.gpuAccess.mode != 'None'",
            "transfer.mode: Ring needs servers that see GPUs, so another gpuAccess.mode than None",
            ".transfer.mode",
        ),
        Rule(
            "self.transfer.mode != 'Ring' || self.network.encryption != 'All' || self.ipc.mode == 'HostPathSocket'",
            "transfer.mode: Ring over TCP is not encrypted; use network.encryption Control or ipc.mode HostPathSocket",
            ".transfer.mode",
        ),
        Rule(
            "!has(self.resources.limits.memory) || quantity(string(self.resources.limits.memory))"
            ".isGreaterThan(quantity(string(self.l1.size)))",
            "resources.limits.memory: must be above l1.size, or the server cannot start",
            ".resources.limits.memory",
        ),
        Rule(
            "!has(self.resources.requests.memory) || !has(self.resources.limits.memory) || "
            "quantity(string(self.resources.requests.memory))"
            ".compareTo(quantity(string(self.resources.limits.memory))) <= 0",
            "resources.requests.memory: must not be above resources.limits.memory",
            ".resources.requests.memory",
        ),
    )


class Pool(Struct, frozen=True, kw_only=True):
    """One pool as the operator sees it: who it is and what it should be."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: PoolSpec

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "size(self.metadata.name) <= 48 && self.metadata.name.matches('^[a-z0-9]+(-[a-z0-9]+)*$')",
            "metadata.name: at most 48 lower case letters, digits and single dashes",
        ),
    )

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    def admits(self, namespace: str) -> bool:
        """True if pods of *namespace* may use the pool."""
        return namespace == self.namespace or namespace in self.spec.clients.allowed_namespaces
