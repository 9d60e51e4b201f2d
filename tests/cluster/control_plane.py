# SPDX-License-Identifier: Apache-2.0
"""A control plane of real Kubernetes programs on loopback: etcd, API server, controllers, scheduler, KWOK.

Everything of a run lives in one folder: certificates, data, logs, the audit log, process ids. Nothing needs root.
"""

import contextlib
import http.client
import ipaddress
import json
import os
import shutil
import socket
import ssl
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml
from tests.cluster.pki import Authority, write_service_account_key
from tests.cluster.processes import Processes, sweep
from tools.cluster_assets import CONTROL_PLANE, assets, find

__all__ = ["PROGRAMS", "ControlPlane", "Site", "base_folder", "free_ports", "missing_programs"]

PROGRAMS = tuple(a for a in CONTROL_PLANE if a.name != "helm")
LOOPBACK = "127.0.0.1"
ANY = "0.0.0.0"
SERVICE_RANGE = "192.0.2.0/24"  # a documentation range: Services get addresses, nothing is ever sent there
ISSUER = "https://kubernetes.default.svc"


@dataclass(frozen=True)
class Site:
    """Where a control plane runs: alone on loopback with simulated nodes, or at an address that real nodes reach."""

    address: str = LOOPBACK
    services: str = SERVICE_RANGE

    @property
    def simulated(self) -> bool:
        """True if its nodes are KWOK's."""
        return self.address == LOOPBACK

    @property
    def first_service(self) -> str:
        """Address of the API server's own Service."""
        return str(next(ipaddress.ip_network(self.services).hosts()))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all are held at once while they are chosen, so they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind((LOOPBACK, 0))
        return [s.getsockname()[1] for s in sockets]


def missing_programs() -> list[str]:
    """Programs that `python tools/cluster_assets.py` would have to build first."""
    return [a.name for a in PROGRAMS if find(a) is None]


def base_folder() -> Path:
    """Folder of all runs of this user."""
    return Path(tempfile.gettempdir()) / f"kvpool-cluster-{os.getuid()}"


@dataclass
class ControlPlane:
    """One running control plane; a context manager that leaves nothing behind."""

    folder: Path = field(init=False)
    programs: dict[str, Path] = field(default_factory=lambda: assets(PROGRAMS))
    keep: bool = False
    """Leave the folder with its logs behind."""
    node_lease_s: int = 40
    """Leases of simulated nodes last so long; a thousand of them need longer ones, or they are most of the load."""

    site: Site = field(default_factory=Site)
    without: tuple[str, ...] = ()
    """Controllers that do not run, by name: those whose work nobody in this run looks at."""
    garbage: int = 100
    """Percent by which the API server's memory grows before it is swept (GOGC): more of it costs less time."""

    def __enter__(self) -> Self:
        sweep(base_folder())
        base_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="run-", dir=base_folder()))
        self.processes = Processes(self.folder)
        self._etcd, self._etcd_peer, self.port, self._kcm, self._scheduler, self._kwok = free_ports(6)
        try:
            self._write_files()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process, then remove the folder unless it is to be kept."""
        self.processes.stop_all()
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def server(self) -> str:
        """Address of the API server."""
        return f"https://{self.site.address}:{self.port}"

    @property
    def audit_log(self) -> Path:
        """One JSON object a line for each write of anybody, and for each call of a service account."""
        return self.folder / "audit.log"

    def kubeconfig(self, user: str, groups: tuple[str, ...] = ()) -> Path:
        """A kubeconfig that makes its reader *user* in *groups*."""
        file = self.folder / "pki" / f"{user.replace(':', '-')}.kubeconfig"
        certificate, key = self.authority.client(file.stem, user, groups)
        return _write_kubeconfig(
            file, self.server, self.authority.file, {"client-certificate": str(certificate), "client-key": str(key)}
        )

    def token_kubeconfig(self, name: str, token: str) -> Path:
        """A kubeconfig for the bearer of *token*."""
        file = self.folder / "pki" / f"{name}.kubeconfig"
        return _write_kubeconfig(file, self.server, self.authority.file, {"token": token})

    def start(self) -> None:
        """Start everything, each part when those before it are ready."""
        self.processes.start("etcd", self._etcd_command(), self._etcd_ready)
        self.start_api_server()
        self.processes.start("kube-controller-manager", self._controllers_command(), lambda: self._healthy(self._kcm))
        self.processes.start("kube-scheduler", self._scheduler_command(), lambda: self._healthy(self._scheduler))
        if self.site.simulated:
            self.processes.start("kwok", self._kwok_command(), self._kwok_ready)

    def start_api_server(self) -> None:
        """Start the API server, also again after it was stopped."""
        environ = {"GOGC": str(self.garbage)}
        self.processes.start("kube-apiserver", self._api_server_command(), self.ready, environ=environ)

    def stop_api_server(self) -> None:
        """End the API server at once; asked nicely it would wait a minute for its watchers."""
        self.processes.stop("kube-apiserver", grace_s=0.0)

    def audit(self, offset: int = 0) -> Iterator[dict[str, Any]]:
        """All entries of the audit log so far, or those after its first *offset* bytes."""
        with self.audit_log.open() as log:
            log.seek(offset)
            for line in log.read().splitlines():
                yield json.loads(line)

    def _write_files(self) -> None:
        self.authority = Authority(self.folder / "pki")
        self._serving = self.authority.serving(
            "kube-apiserver",
            [LOOPBACK, self.site.address, "localhost", "kubernetes.default.svc", self.site.first_service],
        )
        self._sa_private, self._sa_public = write_service_account_key(self.folder / "pki")
        self.admin = self.kubeconfig("admin", ("system:masters",))
        tls = ssl.create_default_context(cafile=str(self.authority.file))
        tls.load_cert_chain(*(self.folder / "pki" / f"admin.{end}" for end in ("crt", "key")))
        self._tls = tls
        (self.folder / "audit.yaml").write_text(yaml.safe_dump(_AUDIT_POLICY))

    def _etcd_command(self) -> list[str | Path]:
        client, peer = f"http://{LOOPBACK}:{self._etcd}", f"http://{LOOPBACK}:{self._etcd_peer}"
        return [
            self.programs["etcd"],
            f"--data-dir={self.folder / 'etcd'}",
            "--unsafe-no-fsync",
            "--auto-compaction-retention=1",
            "--quota-backend-bytes=4294967296",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]

    def _api_server_command(self) -> list[str | Path]:
        certificate, key = self._serving
        return [
            self.programs["kube-apiserver"],
            f"--etcd-servers=http://{LOOPBACK}:{self._etcd}",
            f"--secure-port={self.port}",
            *self._faces(),
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={self.authority.file}",
            f"--service-cluster-ip-range={self.site.services}",
            "--allow-privileged=true",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={self._sa_public}",
            f"--service-account-signing-key-file={self._sa_private}",
            "--max-requests-inflight=0",
            "--max-mutating-requests-inflight=0",
            "--enable-priority-and-fairness=false",
            f"--audit-policy-file={self.folder / 'audit.yaml'}",
            f"--audit-log-path={self.audit_log}",
            "--audit-log-mode=blocking",
        ]

    def _faces(self) -> list[str]:
        """Where the API server is found, and how it reaches kubelets."""
        if self.site.simulated:
            return [
                f"--bind-address={LOOPBACK}",
                f"--advertise-address={LOOPBACK}",
                "--endpoint-reconciler-type=none",
            ]
        certificate, key = self.authority.client("kubelet-client", "kvpool-test-api-server", ("system:masters",))
        return [
            f"--bind-address={ANY}",
            f"--advertise-address={self.site.address}",
            f"--kubelet-client-certificate={certificate}",
            f"--kubelet-client-key={key}",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def _controllers_command(self) -> list[str | Path]:
        kubeconfig = self.kubeconfig("system:kube-controller-manager")
        return [
            self.programs["kube-controller-manager"],
            *self._component(kubeconfig, self._kcm),
            f"--root-ca-file={self.authority.file}",
            f"--service-account-private-key-file={self._sa_private}",
            "--use-service-account-credentials",
            f"--controllers={','.join(['*', *(f'-{name}' for name in self.without)])}",
            f"--node-monitor-grace-period={self.node_lease_s + 10}s",
        ]

    def _scheduler_command(self) -> list[str | Path]:
        kubeconfig = self.kubeconfig("system:kube-scheduler")
        return [self.programs["kube-scheduler"], *self._component(kubeconfig, self._scheduler)]

    def _component(self, kubeconfig: Path, port: int) -> list[str]:
        return [
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics",
            f"--bind-address={LOOPBACK}",
            f"--secure-port={port}",
            f"--cert-dir={self.folder / 'certs' / str(port)}",
            "--leader-elect=false",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
        ]

    def _kwok_command(self) -> list[str | Path]:
        return [
            self.programs["kwok"],
            f"--kubeconfig={self.admin}",
            f"--config={self._stages()}",
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            f"--node-lease-duration-seconds={self.node_lease_s}",
            f"--server-address={LOOPBACK}:{self._kwok}",
        ]

    def _stages(self) -> Path:
        """The stages by which fake nodes and pods live, in one file."""
        found = self.programs["kwok-stages"]
        wanted = ("node/fast", "node/heartbeat-with-lease", "pod/fast")
        texts = [
            f.read_text() for w in wanted for f in sorted((found / w).glob("*.yaml")) if f.name != "kustomization.yaml"
        ]
        texts.append((Path(__file__).parent / "crashing-server.yaml").read_text())
        file = self.folder / "stages.yaml"
        file.write_text("\n---\n".join(texts))
        return file

    def _etcd_ready(self) -> bool:
        return b'"true"' in _answer(http.client.HTTPConnection(LOOPBACK, self._etcd, timeout=2), "/health")

    def _kwok_ready(self) -> bool:
        return _answer(http.client.HTTPConnection(LOOPBACK, self._kwok, timeout=2), "/healthz") == b"ok"

    def _healthy(self, port: int) -> bool:
        """A component serves a certificate of its own making, so it is not verified."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return _answer(http.client.HTTPSConnection(LOOPBACK, port, timeout=2, context=context), "/healthz") == b"ok"

    def ready(self) -> bool:
        """True if the API server says that it is."""
        connection = http.client.HTTPSConnection(LOOPBACK, self.port, timeout=2, context=self._tls)
        return _answer(connection, "/readyz") == b"ok"


def _answer(connection: http.client.HTTPConnection, path: str) -> bytes:
    """Body of a successful GET, or nothing."""
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == http.client.OK else b""
    return b""


_AUDIT_POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "users": ["system:kube-scheduler", "system:kube-controller-manager", "system:apiserver"]},
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system", "system:nodes"]},
        {"level": "None", "users": ["admin"]},
        {"level": "Metadata"},
    ],
}


def _write_kubeconfig(file: Path, server: str, authority: Path, user: dict[str, str]) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": str(authority)}}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    file.write_text(yaml.safe_dump(content))
    return file
