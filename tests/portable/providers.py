# SPDX-License-Identifier: Apache-2.0
"""Clusters that the portable stories run on, each saying what it can do.

``E2E_PROVIDER`` names one:

process   the control plane of tests/cluster on loopback, with simulated nodes (the default)
local     the same programs with two real nodes (tests/e2e)
kind      the kind cluster that ``KIND_CLUSTER`` names; needs Docker with the images of
          ``python -m tools.images --registry localhost operator server``
existing  whatever ``KUBECONFIG`` points to; ``E2E_CAPABILITIES`` says what it can do. Nothing outside of the namespaces
          that the run makes itself is written, so the CRD must be there.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from tests.chart.rendering import Helm
from tests.cluster.control_plane import ControlPlane, free_ports, missing_programs
from tests.cluster.operators import Operator
from tests.cluster.processes import Processes
from tests.cluster.releases import Release
from tests.cluster.servers import statistics
from tests.e2e.kube import Kube, Object
from tests.e2e.local import LocalCluster, archives, why_not
from tools import node_images
from tools.chart import CHART, ROOT
from tools.cluster_assets import ASSETS, find

__all__ = ["CAPABILITIES", "Place", "Provider", "Unavailable", "provider"]

CAPABILITIES: Final = {
    "controllers": "garbage collection and DaemonSets work",
    "pods": "pods get ready, real or simulated",
    "kubelet": "containers run, so that pods can be asked",
    "crd": "the CRD may be installed and changed",
}
NODES: Final = ("portable-a", "portable-b")
SYSTEM: Final = "kvpool-system"
_IMAGES: Final = tuple(node_images.reference(name) for name in ("operator", "server"))
"""What runs in pods of a cluster without a registry."""


class Unavailable(Exception):
    """This machine does not have what the provider needs; the text says what to do."""


@dataclass(frozen=True)
class Place:
    """Where stories happen."""

    kube: Kube
    namespace: str
    placement: Object
    """Puts servers on a node or two."""
    nodes: int
    """How many these are."""

    def pool(self, name: str, **spec: Any) -> Object:
        """A pool for here."""
        return {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVCachePool",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "l1": {"size": "256Mi"},
                "gpuAccess": {"mode": "None"},
                "placement": self.placement,
                "resources": {"requests": {"cpu": "50m"}},
                **spec,
            },
        }


class Provider(ABC):
    """A cluster; `place` makes it ready for stories and leaves nothing behind."""

    name = ""
    capabilities: frozenset[str] = frozenset()

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    @abstractmethod
    def unavailable(self) -> str:
        """Why it cannot be had here; empty if it can."""

    @abstractmethod
    def _open(self, stack: contextlib.ExitStack) -> Place:
        """Start what is to be started, with the operator on it."""

    @contextlib.contextmanager
    def place(self) -> Iterator[Place]:
        """The place, while it is used.

        Raises:
            Unavailable: it cannot be had.
        """
        if reason := self.unavailable():
            raise Unavailable(reason)
        with contextlib.ExitStack() as stack:
            yield self._open(stack)


class _Kubectl:
    """Runs kubectl with one kubeconfig."""

    def __init__(self, program: Path | str, kubeconfig: Path) -> None:
        self._command = [str(program), f"--kubeconfig={kubeconfig}"]

    def __call__(self, *arguments: str, stdin: str = "", timeout_s: float = 60.0) -> str:
        command = [*self._command, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}{done.stdout}"
        return done.stdout


def _program(name: str) -> str:
    """The machine's own program, or the one that was built."""
    found = find(ASSETS[name]) or shutil.which(name)
    return str(found) if found else ""


def _namespace(kube: Kube, stack: contextlib.ExitStack) -> str:
    name = f"kvpool-e2e-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    kube.kubectl("create", "namespace", name)
    stack.callback(kube.kubectl, "delete", "namespace", name, "--wait=false")
    kube.kubectl("label", "namespace", name, *(f"{key}={value}" for key, value in labels.items()))
    return name


class ProcessProvider(Provider):
    """A control plane on loopback; the chart is installed, its operator runs as a process with the chart's rights."""

    name = "process"
    capabilities = frozenset({"controllers", "pods", "crd"})

    def unavailable(self) -> str:
        missing = missing_programs() + ([] if find(ASSETS["helm"]) else ["helm"])
        how = "run `python tools/cluster_assets.py --only control-plane`"
        return f"{', '.join(missing)} missing; {how}" if missing else ""

    def _open(self, stack: contextlib.ExitStack) -> Place:
        running = stack.enter_context(ControlPlane())
        kube = Kube(_Kubectl(running.programs["kubectl"], running.admin))
        kube.kubectl("create", "-f", "-", stdin=yaml.safe_dump_all([_simulated(n) for n in NODES]))
        kube.kubectl("create", "namespace", SYSTEM)
        release = Release(Helm(Path(_program("helm"))), running, SYSTEM)
        release.install({"replicas": 0})
        numbers = stack.enter_context(statistics())
        more = {"KUBECONFIG": str(release.account().kubeconfig), "KVPOOL_OPERATOR_NAMESPACE": SYSTEM}
        operator = Operator(running, "portable-operator", numbers.url, more)
        operator.start()
        stack.callback(operator.stop)
        return Place(kube, _namespace(kube, stack), {"nodeSelector": {"portable/node": "yes"}}, len(NODES))


def _simulated(name: str) -> Object:
    labels, annotations = {"portable/node": "yes"}, {"kwok.x-k8s.io/node": "fake"}
    metadata = {"name": name, "labels": labels, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


class LocalProvider(Provider):
    """Two real nodes on this machine; the operator runs in its pods."""

    name = "local"
    capabilities = frozenset({"controllers", "pods", "kubelet", "crd"})

    def unavailable(self) -> str:
        return why_not()

    def _open(self, stack: contextlib.ExitStack) -> Place:
        running = stack.enter_context(LocalCluster(archives()))
        kube = Kube(running.kubectl)
        _install(kube, Helm(running.programs["helm"]), running.control_plane.admin)
        return Place(kube, _namespace(kube, stack), {"nodeSelector": {}}, 2)


class KindProvider(Provider):
    """An existing kind cluster, with images that docker has loaded into it. The CRD stays, as the chart leaves it."""

    name = "kind"
    capabilities = frozenset({"controllers", "pods", "kubelet", "crd"})

    def unavailable(self) -> str:
        if not self.environ.get("KIND_CLUSTER"):
            return "KIND_CLUSTER does not name a kind cluster"
        missing = [p for p in ("kind", "docker") if shutil.which(p) is None]
        missing += [p for p in ("kubectl", "helm") if not _program(p)]
        if missing:
            return f"{', '.join(missing)} missing"
        if self.environ["KIND_CLUSTER"] not in _output(["kind", "get", "clusters"]).split():
            return f"kind knows no cluster {self.environ['KIND_CLUSTER']}: kind create cluster --name NAME"
        absent = [i for i in _IMAGES if not _succeeds(["docker", "image", "inspect", i])]
        how = "python -m tools.images --registry localhost operator server"
        return f"docker lacks {', '.join(absent)}: {how}" if absent else ""

    def _open(self, stack: contextlib.ExitStack) -> Place:
        cluster = self.environ["KIND_CLUSTER"]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-kind-")))
        kubeconfig = folder / "kubeconfig"
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_text(_output(["kind", "get", "kubeconfig", "--name", cluster]))
        for image in _IMAGES:
            _output(["kind", "load", "docker-image", image, "--name", cluster], timeout_s=300)
        kube, helm = Kube(_Kubectl(_program("kubectl"), kubeconfig)), Helm(Path(_program("helm")))
        stack.callback(kube.kubectl, "delete", "namespace", SYSTEM, "--ignore-not-found", "--wait=false")
        where = ("--kubeconfig", kubeconfig, "--namespace", SYSTEM)
        stack.callback(helm.run, "uninstall", "kvpool", "--ignore-not-found", *where)
        _install(kube, helm, kubeconfig)
        return Place(kube, _namespace(kube, stack), *_two_nodes(kube))


class ExistingProvider(Provider):
    """A cluster of somebody else: the operator runs as a local process and watches the run's namespace alone."""

    name = "existing"

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        words = self.environ.get("E2E_CAPABILITIES", "controllers").replace(",", " ").split()
        if unknown := set(words) - set(CAPABILITIES):
            raise ValueError(f"E2E_CAPABILITIES: {', '.join(sorted(unknown))}; known are {', '.join(CAPABILITIES)}")
        self.capabilities = frozenset(words) - {"crd"}

    def unavailable(self) -> str:
        if not self.environ.get("KUBECONFIG"):
            return "KUBECONFIG does not name a file"
        if not _program("kubectl"):
            return "kubectl is missing"
        found = self._kubectl()("get", "crd", "kvcachepools.kvpool.dev", "--ignore-not-found", "-o", "name")
        return "" if found else "the cluster lacks the CRD: kubectl apply --server-side -f crds/kvcachepools.yaml"

    def _kubectl(self) -> _Kubectl:
        return _Kubectl(_program("kubectl"), Path(self.environ["KUBECONFIG"]))

    def _open(self, stack: contextlib.ExitStack) -> Place:
        kube = Kube(self._kubectl())
        namespace = _namespace(kube, stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-existing-")))
        processes = Processes(folder)
        stack.callback(processes.stop_all, 10.0)
        (port,) = free_ports(1)
        numbers = stack.enter_context(statistics())
        environ = {
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("cacheserver", "operator")),
            "KUBECONFIG": self.environ["KUBECONFIG"],
            "KVPOOL_OPERATOR_NAMESPACE": namespace,
            "KVPOOL_OPERATOR_WATCH_NAMESPACES": namespace,
            "KVPOOL_OPERATOR_HEALTH_PORT": str(port),
            "KVPOOL_OPERATOR_STATS_URL": numbers.url,
            "KVPOOL_OPERATOR_STATS_S": "2",
            "KVPOOL_OPERATOR_STATUS_GAP_S": "1",
        }

        def leads() -> bool:
            return "kvpool-operator" in kube.kubectl("get", "leases", "-n", namespace, "-o", "name")

        command = [sys.executable, "-m", "kvpool_operator", "controller"]
        processes.start("operator", command, leads, environ=environ)
        return Place(kube, namespace, *_two_nodes(kube))


def _install(kube: Kube, helm: Helm, kubeconfig: Path) -> None:
    """The chart with its operator in pods."""
    where = ("--kubeconfig", kubeconfig, "--namespace", SYSTEM, "--create-namespace")
    helm.run("upgrade", "--install", "kvpool", CHART, *where, "--set", "image.registry=localhost")
    kube.kubectl("rollout", "status", "deployment", "--namespace", SYSTEM, "--timeout=120s", timeout_s=130)


def _two_nodes(kube: Kube) -> tuple[Object, int]:
    """A placement on at most two ready nodes that take pods, and how many they are."""
    found = json.loads(kube.kubectl("get", "nodes", "-o", "json"))["items"]
    free = [n["metadata"]["name"] for n in found if not n["spec"].get("taints") and not n["spec"].get("unschedulable")]
    names = sorted(free)[:2]
    if not names:
        raise Unavailable("no node takes pods without tolerations")
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": names}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return {"nodeSelector": {}, "affinity": {"nodeAffinity": required}}, len(names)


def _output(command: list[str], timeout_s: float = 60.0) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{done.stdout}"
    return done.stdout


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0


PROVIDERS: Final[dict[str, type[Provider]]] = {
    p.name: p for p in (ProcessProvider, LocalProvider, KindProvider, ExistingProvider)
}


def provider(environ: Mapping[str, str] = os.environ) -> Provider:
    """The one that ``E2E_PROVIDER`` names."""
    name = environ.get("E2E_PROVIDER") or "process"
    if name not in PROVIDERS:
        raise ValueError(f"E2E_PROVIDER: {name}; known are {', '.join(PROVIDERS)}")
    return PROVIDERS[name](environ)
