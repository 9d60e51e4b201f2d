# SPDX-License-Identifier: Apache-2.0
"""One real node on a machine of its own: containerd, kubelet, kube-proxy, a bridge for its pods."""

import ipaddress
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.control_plane import ControlPlane
from tests.cluster.processes import Processes
from tests.e2e.machine import Machine
from tools import node_images

__all__ = ["DNS_ADDRESS", "PODS", "Node", "NodePlace"]

PODS = ipaddress.ip_network("198.51.100.0/24")
"""Documentation ranges everywhere: no packet of a test can mean anybody."""
DNS_ADDRESS = "192.0.2.11"
_SOCKET = "/run/containerd/containerd.sock"


@dataclass(frozen=True)
class NodePlace:
    """Who a node is in the cluster."""

    number: int

    @property
    def name(self) -> str:
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        return f"192.0.2.{10 + self.number}"

    @property
    def pods(self) -> str:
        """Addresses of its pods."""
        return str(list(PODS.subnets(prefixlen_diff=1))[self.number - 1])


class Node:
    """The programs of one node; they end with its machine."""

    def __init__(self, place: NodePlace, machine: Machine, processes: Processes, programs: Mapping[str, Path]) -> None:
        self.place = place
        self.machine = machine
        self._processes = processes
        self._programs = programs
        folders = dict.fromkeys(str(p.parent) for p in programs.values())
        self._path = os.pathsep.join([*folders, os.environ["PATH"], "/usr/sbin", "/sbin"])

    def start_runtime(self) -> None:
        """Start containerd.

        Raises:
            StartError: it does not get ready.
        """
        config = self._write("containerd.toml", _containerd(self._programs, self._bridge()))
        socket = self.machine.folder / _SOCKET.removeprefix("/")
        self._start("containerd", ["--config", config], socket.exists)

    def load(self, archive: Path) -> None:
        """Import an image.

        Raises:
            AssertionError: containerd refuses it.
        """
        self.ctr("images", "import", archive)

    def ctr(self, *command: str | Path) -> str:
        """Ask containerd, in the namespace of Kubernetes."""
        return self.machine.run(self._programs["ctr"], "-a", _SOCKET, "-n", "k8s.io", *command)

    def join(self, control_plane: ControlPlane) -> None:
        """Start kubelet and kube-proxy; the node gets ready by and by.

        Raises:
            StartError: one ended at once.
        """
        name = self.place.name
        kubeconfig = control_plane.kubeconfig(f"system:node:{name}", ("system:nodes",))
        settings = _kubelet(str(control_plane.authority.file), self.machine.group)
        options = ["--config", self._write("kubelet.yaml", yaml.safe_dump(settings)), "--kubeconfig", kubeconfig]
        options += ["--hostname-override", name, "--node-ip", self.place.address, "--cert-dir", "/var/lib/kubelet/pki"]
        self._start("kubelet", options, lambda: True)
        proxy = _kube_proxy(name, str(control_plane.kubeconfig("system:kube-proxy")))
        self._start("kube-proxy", ["--config", self._write("kube-proxy.yaml", yaml.safe_dump(proxy))], lambda: True)

    def _start(self, program: str, options: list[str | Path], ready: Any) -> None:
        command = self.machine.inside(self._programs[program], *options)
        self._processes.start(f"{self.place.name}-{program}", command, ready, environ={"PATH": self._path})

    def _write(self, name: str, text: str) -> Path:
        file = self.machine.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def _bridge(self) -> Path:
        """Folder with the configuration of the pods' network."""
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": "/var/lib/cni",
                "ranges": [[{"subnet": self.place.pods}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        network = {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}
        return self._write("cni/10-pods.conflist", json.dumps(network)).parent


def _containerd(programs: Mapping[str, Path], networks: Path) -> str:
    return f"""
version = 3
root = '/var/lib/containerd'
state = '/run/containerd'
[grpc]
  address = '{_SOCKET}'
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{node_images.PAUSE}'
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = '{programs["runc"]}'
      SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['{programs["bridge"].parent}']
    conf_dir = '{networks}'
"""


def _kubelet(authority: str, group: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        "readOnlyPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": authority},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{group}",
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{_SOCKET}",
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "100Mi"},
        "failCgroupV1": False,
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "makeIPTablesUtilChains": False,
        "nodeStatusReportFrequency": "10s",
        "oomScoreAdj": 0,
        "registerNode": True,
        "syncFrequency": "15s",  # a changed ConfigMap is in a pod by then; by default it takes a minute
    }


def _kube_proxy(name: str, kubeconfig: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": name,
        "clusterCIDR": str(PODS),
        "clientConnection": {"kubeconfig": kubeconfig},
        # Counts of connections are the host's.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
