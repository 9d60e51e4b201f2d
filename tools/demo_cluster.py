# SPDX-License-Identifier: Apache-2.0
"""Second act of the demo: a real control plane, the chart, the operator with the chart's account, and one pool's life.

Nodes are simulated: they run no containers, so one loopback process stands for all servers' statistics, and the
operator, which would be one of these containers, runs as a process of this machine.
"""

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from tests.cluster.control_plane import PROGRAMS, ControlPlane
from tests.cluster.operators import Operator
from tests.cluster.servers import Statistics, statistics
from tools.chart import CHART
from tools.cluster_assets import ASSETS, AssetError, assets
from tools.demo_act import ActSkipped, say

from kvpool.cli.errors import Failure

__all__ = ["play"]

RELEASE: Final = "kvpool-system"
NAMESPACE: Final = "models"
NODES: Final = 4
WITHIN_S: Final = 180.0
LOOK_AGAIN_S: Final = 0.3
CHILDREN: Final = "daemonsets,services,configmaps,networkpolicies,secrets"
POOL: Final[dict[str, Any]] = {
    "apiVersion": "kvpool.dev/v1alpha1",
    "kind": "KVCachePool",
    "metadata": {"name": "main", "namespace": NAMESPACE},
    "spec": {
        "l1": {"size": "64Gi"},
        "gpuAccess": {"mode": "None"},
        "placement": {"nodeSelector": {"node.kubernetes.io/instance-type": "simulated"}},
        "update": {"strategy": "Paced", "settle": "2s", "maxUnavailable": 2},
    },
}


def play(out: Path) -> str:
    """Run the act; returns what went wrong, empty for a success.

    Args:
        out: existing folder; the operator's log is left there.

    Raises:
        ActSkipped: the programs of a control plane are not here and cannot be built.
        Failure: a part does not do what it should.
    """
    start = time.perf_counter()
    try:
        programs = assets((*PROGRAMS, ASSETS["helm"]))
    except AssetError as e:
        raise ActSkipped(str(e).splitlines()[0]) from e
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(_stage(programs, out))
        say(f"control plane: {', '.join(p.name for p in PROGRAMS[:4])}, {NODES} simulated nodes; ready")
        stage.install()
        stack.enter_context(stage.operator())
        stage.make_pool()
        stage.change()
        say(f"\nall of it took {time.perf_counter() - start:.0f} s and is being stopped")
    return ""


@dataclass
class _Stage:
    """The running control plane, and everything that a person would type."""

    control_plane: ControlPlane
    helm: Path
    out: Path
    numbers: Statistics

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Run kubectl as the administrator; returns what it prints."""
        kubeconfig = f"--kubeconfig={self.control_plane.admin}"
        return _run([self.control_plane.programs["kubectl"], kubeconfig, *arguments], stdin)

    def install(self) -> None:
        """The chart; its Deployment has no replicas here, since simulated nodes would only pretend to run them."""
        say(f"\n$ helm install kvpool charts/kvpool --namespace {RELEASE} --create-namespace --set replicas=0")
        where = ["--kubeconfig", self.control_plane.admin, "--namespace", RELEASE, "--create-namespace"]
        _run([self.helm, "install", "kvpool", CHART, *where, "--set", "replicas=0"])
        kinds = "customresourcedefinitions,clusterroles,serviceaccounts"
        found = self._names(kinds, "-A", "-l", "app.kubernetes.io/managed-by=Helm")
        say(f"  made {', '.join(found)}")

    @contextlib.contextmanager
    def operator(self) -> Iterator[None]:
        """The operator as a local process that may do exactly what the chart's account may."""
        token = self.kubectl("create", "token", "kvpool-operator", "--namespace", RELEASE).strip()
        kubeconfig = self.control_plane.token_kubeconfig("demo-operator", token)
        more = {"KUBECONFIG": str(kubeconfig), "KVPOOL_OPERATOR_NAMESPACE": RELEASE}
        running = Operator(self.control_plane, "demo-operator", self.numbers.url, more)
        running.start()
        who = json.loads(self._as(kubeconfig, "auth", "whoami", "-o", "json"))["status"]["userInfo"]["username"]
        say(f"operator: runs as {who}, with a token of its own")
        try:
            yield
        finally:
            running.stop()
            (self.out / "operator.log").write_text(running.log())

    def make_pool(self) -> None:
        """A pool, until it is ready; then what it owns."""
        self.kubectl("create", "namespace", NAMESPACE)
        say(f"\n$ kubectl apply -f - <<EOF\n{yaml.safe_dump(POOL, sort_keys=False).rstrip()}\nEOF")
        self.kubectl("apply", "-f", "-", stdin=json.dumps(POOL))
        self._wait("the pool to be ready", self._ready)
        self._wait("what the servers say", lambda: bool(self._status().get("capacity")))
        say(f"\n$ kubectl get kvp -n {NAMESPACE}\n{self.kubectl('get', 'kvp', '-n', NAMESPACE).rstrip()}")
        say("\nits children: " + ", ".join(self._names(CHILDREN, "-n", NAMESPACE, "-l", "kvpool.dev/pool=main")))

    def change(self) -> None:
        """A change that reaches the servers by a paced update; each step of it is printed."""
        before = self._pods()
        patch = {"spec": {"resources": {"requests": {"cpu": "750m"}}}}
        say(f"\n$ kubectl patch kvp main -n {NAMESPACE} --type merge -p '{json.dumps(patch)}'")
        self.kubectl("patch", "kvp", "main", "-n", NAMESPACE, "--type", "merge", "-p", json.dumps(patch))
        said: set[str] = set()

        def done() -> bool:
            self._ask_prompts()
            step = self._status().get("rollout", {})
            line = f"  {step.get('state', '')}: {step.get('message', '')}".rstrip(": ")
            if line not in said:
                said.add(line)
                say(line)
            return self._ready() and not before & self._pods() and bool(self._status().get("hitRate"))

        self._wait("the update", done)
        say(f"every server was replaced, at most {POOL['spec']['update']['maxUnavailable']} at a time")
        say(f"\n$ kubectl get kvp -n {NAMESPACE} -o wide")
        say(self.kubectl("get", "kvp", "-n", NAMESPACE, "-o", "wide").rstrip())

    def _ask_prompts(self) -> None:
        """As if engines had looked up 40 prompts of 1,024 tokens and found seven tenths of them."""
        for name, more in (
            ('kvpool_lookups_total{reason="all"}', 40),
            ("kvpool_lookup_tokens_total", 40960),
            ("kvpool_hit_tokens_total", 28672),
        ):
            self.numbers.series[name] = self.numbers.series.get(name, 0.0) + more

    def _names(self, *arguments: str) -> list[str]:
        """Objects as kind/name, their kinds without groups."""
        found = self.kubectl("get", *arguments, "-o", "name").split()
        return [f"{kind.partition('.')[0]}/{name}" for kind, _, name in (f.partition("/") for f in found)]

    def _as(self, kubeconfig: Path, *arguments: str) -> str:
        return _run([self.control_plane.programs["kubectl"], f"--kubeconfig={kubeconfig}", *arguments])

    def _pool(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", "kvp", "main", "-n", NAMESPACE, "-o", "json"))
        return found

    def _status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._pool().get("status", {})
        return found

    def _ready(self) -> bool:
        pool = self._pool()
        for condition in pool.get("status", {}).get("conditions", []):
            if condition["type"] == "Ready":
                fresh = condition["observedGeneration"] == pool["metadata"]["generation"]
                return bool(fresh and condition["status"] == "True")
        return False

    def _pods(self) -> set[str]:
        answer = self.kubectl("get", "pods", "-n", NAMESPACE, "-l", "kvpool.dev/role=server", "-o", "json")
        return {p["metadata"]["uid"] for p in json.loads(answer)["items"]}

    def _wait(self, what: str, check: Callable[[], bool]) -> None:
        pause, end = threading.Event(), time.monotonic() + WITHIN_S
        while not check():
            if time.monotonic() > end:
                raise Failure(f"waited {WITHIN_S:.0f} s for {what}; see .demo/operator.log")
            pause.wait(LOOK_AGAIN_S)


@contextlib.contextmanager
def _stage(programs: dict[str, Path], out: Path) -> Iterator[_Stage]:
    """A control plane with simulated nodes."""
    with ControlPlane(programs=programs) as running, statistics() as numbers:
        numbers.clients, numbers.used_bytes = 2, 12 << 30
        numbers.more = {"l1_bytes": 64 << 30}
        made = _Stage(running, programs["helm"], out, numbers)
        nodes = [_node(i) for i in range(NODES)]
        made.kubectl("create", "-f", "-", stdin=yaml.safe_dump_all(nodes))
        made.kubectl("wait", "nodes", "--all", "--for=condition=Ready", "--timeout=60s")
        yield made


def _node(number: int) -> dict[str, Any]:
    labels = {"node.kubernetes.io/instance-type": "simulated"}
    annotations = {"kwok.x-k8s.io/node": "fake"}
    metadata = {"name": f"node-{number}", "labels": labels, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


def _run(command: list[str | Path], stdin: str = "") -> str:
    """What *command* prints.

    Raises:
        Failure: it failed; the text is its own.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise Failure(f"{Path(command[0]).name} {command[-1]}: {done.stderr.strip()}")
    return done.stdout
