# SPDX-License-Identifier: Apache-2.0
"""A whole cluster on this host: the real control plane and two real nodes, each on a machine of its own.

Everything lives in network namespaces without a way out. The thread that holds a `LocalCluster` is in the first node's,
so Services and pods answer it as they answer anybody on that node.

    python -m tests.e2e.local       builds what is missing; or says why this host cannot run it, with exit status 3
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.cluster.control_plane import ControlPlane, Site, base_folder
from tests.cluster.processes import Processes, sweep, wait_for
from tests.e2e.dns import __file__ as dns_program
from tests.e2e.existing import ExistingCluster
from tests.e2e.kube import write_state
from tests.e2e.machine import Machine, entered, link, missing_capability, remove_groups, stale_groups
from tests.e2e.node import DNS_ADDRESS, Node, NodePlace
from tools import images, node_images, vllm_env
from tools.cluster_assets import CONTROL_PLANE, NODES, assets, find
from tools.images import ROOT

__all__ = ["COLLECTED", "LocalCluster", "archives", "cannot", "main", "why_not"]

SERVICES = "203.0.113.0/24"
CANNOT = 3
"""Exit status of a host that lacks something, as opposed to a build that failed."""
PROGRAMS = (*NODES, *(a for a in CONTROL_PLANE if a.name not in ("kwok", "kwok-stages")))
COLLECTED = ROOT / "build" / "e2e"
"""Where the state of failed clusters goes."""
PLACES = (NodePlace(1), NodePlace(2))


def cannot() -> str:
    """Why this host cannot run a local cluster, whatever is built; empty if it can."""
    if reason := missing_capability():
        return reason
    try:
        images.buildah()
    except images.ImageError as e:
        return str(e)
    if shutil.which("debootstrap") is None:
        return "debootstrap is not installed"
    return _cannot_build([a.name for a in PROGRAMS if not find(a)])


def _cannot_build(missing: Sequence[str]) -> str:
    if missing and shutil.which("go") is None:
        return f"{', '.join(missing)} missing, and there is no Go to build them"
    if "runc" in missing and subprocess.run(["pkg-config", "--exists", "libseccomp"], check=False).returncode:
        return "runc is missing, and building it needs pkg-config and the headers of libseccomp"
    return ""


def why_not() -> str:
    """Why this host cannot run a local cluster now; empty if it can."""
    missing = [a.name for a in PROGRAMS if not find(a)]
    return cannot() or (f"{', '.join(missing)} missing; run `make e2e`, which builds them" if missing else "")


def archives() -> list[Path]:
    """Archives of all images, built where their sources changed.

    Raises:
        ImageError: one cannot be built.
    """
    return [node_images.archive(name) for name in node_images.NAMES]


class LocalCluster(ExistingCluster):
    """Two nodes that are ready, with images loaded; a context manager that leaves nothing behind."""

    def __init__(self, archives: Sequence[Path]) -> None:  # the programs are found when it starts
        self._archives = archives
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        base = base_folder()
        sweep(base)
        for group in stale_groups(base):
            remove_groups(group)
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
        try:
            self._start()
        except BaseException:
            with contextlib.suppress(AttributeError):  # what was not made yet
                self.collect(COLLECTED / "start")
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End nodes and control plane, leave the namespace, remove the folder."""
        with contextlib.ExitStack() as last:
            last.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._stack.close()

    def _start(self) -> None:
        self.programs = assets(PROGRAMS)
        self.processes = Processes(self.folder)
        self._stack.callback(self.processes.stop_all, 0.0)
        machines = [self._machine(place) for place in PLACES]
        link(machines[0], machines[1], [f"{p.address}/24" for p in PLACES])
        for machine, other in zip(machines, reversed(PLACES), strict=True):
            # Without a default route the API server takes 40 s to start.
            machine.run("ip", "route", "add", "default", "via", other.address)
            machine.run("ip", "route", "add", other.pods, "via", other.address)
        self._stack.enter_context(entered(machines[0].network))
        self.nodes = [Node(p, m, self.processes, self.programs) for p, m in zip(PLACES, machines, strict=True)]
        loading = [threading.Thread(target=self._load, args=(n,)) for n in self.nodes]
        for node, thread in zip(self.nodes, loading, strict=True):
            node.start_runtime()
            thread.start()
        self._failed: list[BaseException] = []
        self.control_plane = self._stack.enter_context(ControlPlane(site=Site(PLACES[0].address, SERVICES)))
        self.kubeconfig = self.control_plane.admin
        command = [sys.executable, dns_program, DNS_ADDRESS, self.control_plane.admin]
        self.processes.start("dns", command, lambda: True)
        for node in self.nodes:
            node.join(self.control_plane)
        for thread in loading:
            thread.join()
        if self._failed:
            raise self._failed[0]
        wait_for("ready nodes", self._ready, 120)

    def _machine(self, place: NodePlace) -> Machine:
        machine = Machine(self.processes, place.name, self._pause())
        self._stack.callback(machine.stop)
        machine.start()
        return machine

    def _pause(self) -> Path:
        """The program alone, for the machines' first processes."""
        file = self.folder / "pause"
        if not file.exists():
            node_images.build_pause(file)
        return file

    def _load(self, node: Node) -> None:
        try:
            for archive in self._archives:
                node.load(archive)
        except BaseException as e:  # noqa: BLE001 - raised again by whoever waits
            self._failed.append(e)

    def _ready(self) -> bool:
        """All nodes say so, and the taint that kept pods away from them before is gone as well."""
        found = json.loads(self.kubectl("get", "nodes", "-o", "json"))["items"]
        ready = [
            n for n in found if any(c["type"] == "Ready" and c["status"] == "True" for c in n["status"]["conditions"])
        ]
        return len(ready) == len(PLACES) and not any(n["spec"].get("taints") for n in found)

    def collect(self, target: Path) -> None:
        """Write down all there is to know for somebody who looks for the reason of a failure."""
        target.mkdir(parents=True, exist_ok=True)
        for run in (self.folder, self.control_plane.folder):
            shutil.copytree(run / "logs", target / "programs", dirs_exist_ok=True)
        write_state(self.kubectl, target)


def main() -> int:
    """Build programs, images and the engines' environment; 3 with the reason if this host cannot run the cluster.

    A cluster that somebody else runs (``E2E_PROVIDER=existing``) needs the environment alone.
    """
    if os.environ.get("E2E_PROVIDER") != "existing":
        if reason := cannot():
            sys.stdout.write(f"{reason}\n")
            return CANNOT
        assets(PROGRAMS)
        archives()
    vllm_env.environment()
    return 0


if __name__ == "__main__":
    sys.exit(main())
