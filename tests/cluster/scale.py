# SPDX-License-Identifier: Apache-2.0
"""A thousand simulated nodes, many pools on them, and one operator with the chart's rights: what it writes and needs.

Used by tests/cluster/test_scale.py and by `python -m benchmarks.operator_scale`. Every number is the API server's, the
kernel's or the clock's; what the operator says of itself is only compared with the DaemonSets' own status.
"""

import asyncio
import contextlib
import json
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.chart.rendering import Helm
from tests.cluster.conftest import NAMESPACES, Caller, connect
from tests.cluster.control_plane import ControlPlane, free_ports
from tests.cluster.operators import Operator
from tests.cluster.releases import Release

from kvpool_operator import children
from kvpool_operator.cluster import CHILDREN, NODES, PODS, POOLS, Cluster
from kvpool_operator.desired.names import WIRED
from kvpool_operator.errors import Busy, Conflict
from kvpool_operator.keys import known_key
from kvpool_operator.spec import parse_pool
from kvpool_operator.spec.quantity import binary
from kvpool_operator.wiring import wiring_mark

__all__ = ["Outcome", "Phase", "Scale", "Size", "play", "scale"]

ALL = "all"
"""Name of the pool that has a server on each node."""
RELEASE = "kvpool-system"
AT_ONCE = 32
ATTEMPTS = 5
WRITES = frozenset({"create", "update", "patch", "delete"})
MIB = 1 << 20
PACED = {"strategy": "Paced", "maxUnavailable": "10%", "settle": "1s"}
UNUSED = ("endpoints-controller", "endpointslice-controller", "endpointslice-mirroring-controller")
"""Controllers that write down addresses of pods for Services: nobody here connects to one, and with a thousand servers
they would be most of the load."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    nodes: int = 1000
    pools: int = 50
    nodes_each: int = 20
    clients: int = 5000

    def __post_init__(self) -> None:
        assert self.pools * self.nodes_each == self.nodes


@dataclass(frozen=True)
class Phase:
    """What one change of all pools took."""

    name: str
    seconds: float
    writes: dict[str, Counter[str]]
    """By pool: how often the operator wrote what; deleted pods are "delete pods"."""
    reads: int
    """Its calls that wrote nothing, watches not counted."""
    failures: tuple[str, ...]
    """Passes that failed, as its log has them."""
    refused: tuple[str, ...]
    """Calls that the API server refused for want of rights."""

    def writes_of(self, pool: str, *, deletes: bool = False) -> int:
        """All writes for *pool*; without the pods that it deleted unless *deletes*."""
        found = self.writes.get(pool, Counter())
        return sum(n for what, n in found.items() if deletes or what != "delete pods")

    @property
    def most_writes(self) -> tuple[int, str]:
        """The most that any pool cost, and its name."""
        return max((self.writes_of(p), p) for p in self.writes)


@dataclass(frozen=True)
class Outcome:
    """All that was found out."""

    create: Phase
    rolling: Phase
    paced: Phase
    peak_bytes: int
    """The most that was resident of the operator."""
    idle_writes: tuple[str, ...]

    @property
    def changes(self) -> tuple[Phase, Phase]:
        """The two changes of all pools at once."""
        return self.rolling, self.paced


class Scale:
    """The running scene."""

    def __init__(self, control_plane: ControlPlane, api: Caller, operator: Operator, size: Size) -> None:
        self.control_plane, self.api, self.operator, self.size = control_plane, api, operator, size
        self._user = f"system:serviceaccount:{RELEASE}:kvpool-operator"
        self.peak_bytes = 0

    def pools(self) -> list[str]:
        """Names of all pools; each has a namespace of its name."""
        return [ALL, *(f"p{i:02}" for i in range(self.size.pools))]

    def make_nodes(self) -> None:
        """All nodes, each in the group of one pool."""
        self._many([partial(self._node, i) for i in range(self.size.nodes)])

    async def _node(self, number: int) -> None:
        group = f"p{number // self.size.nodes_each:02}"
        metadata = {
            "name": f"n{number:04}",
            "labels": {"scale/group": group, "scale/all": "yes"},
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        }
        await self.api.cluster.create(NODES, "", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})

    def make_pools(self, strategy: str) -> Phase:
        """All pools at once, until each is ready."""
        return self.measured("create", lambda: self._many([partial(self._pool, p, strategy) for p in self.pools()]))

    async def _pool(self, name: str, strategy: str) -> None:
        selector = {"scale/all": "yes"} if name == ALL else {"scale/group": name}
        spec = {
            "l1": {"size": "1Gi"},
            "gpuAccess": {"mode": "None"},
            "placement": {"nodeSelector": selector},
            "update": {**PACED, "strategy": strategy},
        }
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await self.api.cluster.create(NAMESPACES, "", namespace)
        body = {"apiVersion": POOLS.api_version, "kind": POOLS.kind, "metadata": {"name": name}, "spec": spec}
        await self.api.cluster.create(POOLS, name, body)

    def change(self, name: str, edit: Callable[[dict[str, Any]], None]) -> Phase:
        """*edit* the spec of all pools at once, until each pool's servers run what it says."""
        return self.measured(name, lambda: self._many([partial(self._edit, p, edit) for p in self.pools()]))

    async def _edit(self, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
        while True:
            body = await self.api.cluster.get(POOLS, name, name)
            edit(body["spec"])
            with contextlib.suppress(Conflict):
                await self.api.cluster.replace(POOLS, body)
                return

    def make_clients(self) -> None:
        """Pods that opted in, wired: each node's share in the namespace of its group's pool, on their nodes at once."""
        marks = {pool: self.api(self._mark(pool)) for pool in self.pools() if pool != ALL}
        self._many([partial(self._client, i, marks) for i in range(self.size.clients)])

    async def _mark(self, name: str) -> str:
        """What admission would mark pods with that it has wired to the pool as it is now."""
        pool = parse_pool(await self.api.cluster.get(POOLS, name, name))
        live = await children.find(self.api.cluster, pool)
        return wiring_mark(pool, known_key(live.values()), name)

    async def _client(self, number: int, marks: Mapping[str, str]) -> None:
        node = number % self.size.nodes
        pool = f"p{node // self.size.nodes_each:02}"
        environment = [{"name": f"SETTING_{i}", "value": "as long as such values are" * 2} for i in range(20)]
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"engine-{number:05}",
                "labels": {"kvpool.dev/pool": pool, "app": "engine"},
                "annotations": {WIRED: marks[pool]},
            },
            "spec": {
                "nodeName": f"n{node:04}",
                "containers": [{"name": "engine", "image": "engine", "args": ["serve"], "env": environment}],
            },
        }
        await self.api.cluster.create(PODS, pool, body)

    def wait_for_clients(self) -> None:
        """Until the pools' statuses name all pods that opted in."""

        async def counted() -> bool:
            found = 0
            for pool in await self.api.cluster.list(POOLS):
                conditions = {c["type"]: c for c in pool.get("status", {}).get("conditions", ())}
                wired = conditions.get("ClientsWired", {"status": "Unknown"})
                found += int(wired["message"].split()[0]) if wired["status"] == "True" else 0
            self.look()
            return found == self.size.clients

        self.api.wait("all clients in the statuses", lambda: _seldom(counted), 600.0)

    def settle(self) -> None:
        """Until all servers' statistics are in the statuses: each says its size, and they are read now and then."""
        wanted = {pool: binary(count << 30) for pool, count in self._servers().items()}

        async def told() -> bool:
            found = await self.api.cluster.list(POOLS)
            return {p["metadata"]["name"]: p["status"].get("capacity") for p in found} == wanted

        self.api.wait("all servers' statistics in the statuses", lambda: _seldom(told), 600.0)

    def _servers(self) -> dict[str, int]:
        """How many servers each pool has."""
        return {p: self.size.nodes if p == ALL else self.size.nodes_each for p in self.pools()}

    def measured(self, name: str, act: Callable[[], None]) -> Phase:
        """Do *act*, wait until all pools are ready and their DaemonSets say so, too; returns what it took."""
        offset, log = self.control_plane.audit_log.stat().st_size, len(self.operator.log())
        start = time.monotonic()
        act()
        self.api.wait(name, lambda: _seldom(self._converged), 1200.0)
        seconds = time.monotonic() - start
        entries = [e for e in self.control_plane.audit(offset) if e["user"]["username"] == self._user]
        return Phase(
            name,
            seconds,
            _writes(entries),
            sum(e["verb"] in ("get", "list") for e in entries),
            tuple(_failures(self.operator.log()[log:])),
            tuple(e["requestURI"] for e in entries if e.get("responseStatus", {}).get("code") == 403),
        )

    async def _converged(self) -> bool:
        self.look()
        found = await self.api.cluster.list(POOLS)
        if len(found) < len(self.pools()) or not all(_ready(p) for p in found):
            return False
        sets = await self.api.cluster.list(CHILDREN["DaemonSet"])
        return all(_updated(d) for d in sets) and self._servers_as_expected(found)

    def _servers_as_expected(self, found: list[dict[str, Any]]) -> bool:
        return {p["metadata"]["name"]: p["status"]["servers"]["ready"] for p in found} == self._servers()

    def look(self) -> int:
        """Resident memory of the operator now, in bytes; the most seen is kept."""
        pid = self.control_plane.processes.running[self.operator.name].pid
        now = _resident(pid)
        self.peak_bytes = max(self.peak_bytes, now)
        return now

    def writes_during(self, seconds: float) -> list[str]:
        """What the operator writes within *seconds* while nobody does anything; its Lease does not count."""
        offset = self.control_plane.audit_log.stat().st_size

        async def rest() -> None:
            await asyncio.sleep(seconds)  # the span itself is what is asked about

        self.api(rest())
        entries = [e for e in self.control_plane.audit(offset) if e["user"]["username"] == self._user]
        return [f"{e['verb']} {e['requestURI']}" for e in entries if _is_write(e)]

    def _many(self, work: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Do all of *work*, a few at a time; what a busy API server did not do is done again."""

        async def all_of_it() -> None:
            gate = asyncio.Semaphore(AT_ONCE)

            async def one(part: Callable[[], Coroutine[Any, Any, None]]) -> None:
                async with gate:
                    for _ in range(ATTEMPTS - 1):
                        with contextlib.suppress(Busy):
                            return await part()
                    return await part()

            await asyncio.gather(*(one(w) for w in work))

        self.api(all_of_it())


def play(scene: Scale, idle_s: float, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Pools made, pods opted in, a change by RollingUpdate, one by Paced, then *idle_s* of rest."""
    create = scene.make_pools("RollingUpdate")
    say(f"{len(scene.pools())} pools ready after {create.seconds:.0f} s; {scene.look() // MIB} MiB resident")
    scene.make_clients()
    scene.wait_for_clients()
    say(f"{scene.size.clients} pods opted in and counted; {scene.look() // MIB} MiB resident")
    rolling = scene.change("rolling", lambda spec: spec.update(_another_pod("rolling")))
    say(f"a change of all pools by RollingUpdate took {rolling.seconds:.0f} s; {scene.look() // MIB} MiB resident")
    paced = scene.change("paced", lambda spec: spec.update(_another_pod("paced"), update=PACED))
    say(f"a change of all pools by Paced took {paced.seconds:.0f} s; {scene.look() // MIB} MiB resident")
    scene.settle()
    idle = scene.writes_during(idle_s)
    say(f"{len(idle)} writes in {idle_s:.0f} s of rest")
    return Outcome(create, rolling, paced, scene.peak_bytes, tuple(idle))


def _another_pod(value: str) -> dict[str, Any]:
    """Part of a spec that only a new pod can take over."""
    return {"env": [{"name": "SCALE_CHANGE", "value": value}]}


async def _seldom(check: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
    """*check*, and a second's rest if it fails: asking is load, too."""
    with contextlib.suppress(Busy):  # the machine is; the deadline is the caller's
        if await check():
            return True
    await asyncio.sleep(1.0)
    return False


def _ready(pool: dict[str, Any]) -> bool:
    conditions = {c["type"]: c for c in pool.get("status", {}).get("conditions", ())}
    ready = conditions.get("Ready", {})
    return ready.get("status") == "True" and ready["observedGeneration"] == pool["metadata"]["generation"]


def _updated(daemon_set: dict[str, Any]) -> bool:
    status, generation = daemon_set.get("status", {}), daemon_set["metadata"]["generation"]
    ready = status.get("numberReady", 0)
    if daemon_set["spec"]["updateStrategy"]["type"] == "OnDelete":  # its controller then does not count the updated
        return bool(status.get("observedGeneration") == generation and ready == status["desiredNumberScheduled"])
    updated = status.get("updatedNumberScheduled") == ready == status.get("desiredNumberScheduled")
    return bool(status.get("observedGeneration") == generation and updated)


def _is_write(entry: dict[str, Any]) -> bool:
    return (
        entry["verb"] in WRITES
        and entry.get("objectRef", {}).get("resource") not in ("leases", None)
        and "dryRun" not in entry["requestURI"]
    )


def _writes(entries: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for entry in entries:
        if _is_write(entry):
            about = entry["objectRef"]
            what = "/".join(filter(None, (about["resource"], about.get("subresource"))))
            found.setdefault(about["namespace"], Counter())[f"{entry['verb']} {what}"] += 1
    return found


def _failures(log: str) -> Iterator[str]:
    for line in log.splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if entry["event"] in ("pool.failed", "pool.retried", "pool.waits", "resync.failed", "watches.failed"):
                yield line


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (text,) = (line.split()[1] for line in lines if line.startswith("VmRSS:"))
    return int(text) * 1024


def _serve_statistics(control_plane: ControlPlane) -> str:
    """A process that answers for all servers; returns where, as the operator's setting says it."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/"

    def answers() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "ready", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    command = [sys.executable, "-m", "tests.cluster.servers", str(port)]
    control_plane.processes.start("statistics", command, answers, environ={"PYTHONPATH": str(ROOT)})
    return url + "{ip}"


@contextlib.contextmanager
def scale(size: Size, helm: Helm, **more: str) -> Iterator[Scale]:
    """Nodes, the chart installed, its operator running with its account; *more* is its environment."""
    with contextlib.ExitStack() as stack:
        control_plane = stack.enter_context(ControlPlane(node_lease_s=600, without=UNUSED, garbage=300))
        runner = stack.enter_context(asyncio.Runner())
        client = runner.run(connect(control_plane.admin))
        stack.callback(lambda: runner.run(client.close()))
        api = Caller(runner, Cluster(client))
        api(
            api.cluster.create(NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": RELEASE}})
        )
        release = Release(helm, control_plane, RELEASE)
        # No admission server runs here; a webhook that nobody serves holds each pod up for seconds.
        release.install({"replicas": 0, "webhook": {"enabled": False}})
        url = _serve_statistics(control_plane)
        defaults = {"STATS_S": "30", "STATUS_GAP_S": "5", "LEASE_S": "15"}
        environ = {
            "KUBECONFIG": str(release.account().kubeconfig),
            "KVPOOL_OPERATOR_NAMESPACE": RELEASE,
            **{f"KVPOOL_OPERATOR_{name}": value for name, value in defaults.items()},
            **more,
        }
        made = Scale(control_plane, api, Operator(control_plane, "operator", url, environ), size)
        made.make_nodes()
        made.operator.start()
        stack.callback(made.operator.stop)
        yield made
