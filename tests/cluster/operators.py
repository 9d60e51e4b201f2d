# SPDX-License-Identifier: Apache-2.0
"""Operator processes for tests: the real program, told of its surroundings by the environment."""

import contextlib
import http.client
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.control_plane import ControlPlane, free_ports

__all__ = ["NAMESPACE", "Operator", "operator"]

NAMESPACE = "kvpool-system"
_ROOT = Path(__file__).parents[2]


@dataclass
class Operator:
    """One replica."""

    control_plane: ControlPlane
    name: str
    stats_url: str
    more: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.port,) = free_ports(1)

    def start(self) -> None:
        """Start it and wait until it says that it is well; again after a stop."""
        environ = {
            "PYTHONPATH": os.pathsep.join(str(_ROOT / part) for part in ("cacheserver", "operator")),
            "KUBECONFIG": str(self.control_plane.kubeconfig("kvpool-operator", ("system:masters",))),
            "KVPOOL_OPERATOR_NAMESPACE": NAMESPACE,
            "KVPOOL_OPERATOR_IDENTITY": self.name,
            "KVPOOL_OPERATOR_STATS_URL": self.stats_url,
            "KVPOOL_OPERATOR_HEALTH_PORT": str(self.port),
            "KVPOOL_OPERATOR_STATS_S": "2",
            "KVPOOL_OPERATOR_STATUS_GAP_S": "1",
            "KVPOOL_OPERATOR_LEASE_S": "4",
            **self.more,
        }
        command = [sys.executable, "-m", "kvpool_operator", "controller"]
        self.control_plane.processes.start(self.name, command, self.well, environ=environ)

    def well(self) -> bool:
        """True if it says so."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/healthz")
            return connection.getresponse().status == http.client.OK
        return False

    def stop(self) -> None:
        """End it as a cluster would."""
        self.control_plane.processes.stop(self.name, grace_s=10.0)

    def kill(self) -> None:
        """End it at once."""
        self.control_plane.processes.stop(self.name, grace_s=0.0)

    def log(self) -> str:
        """All it wrote so far."""
        return self.control_plane.processes.log(self.name).read_text()


@contextlib.contextmanager
def operator(control_plane: ControlPlane, name: str, stats_url: str, **more: str) -> Iterator[Operator]:
    """A running replica."""
    made = Operator(control_plane, name, stats_url, more)
    made.start()
    try:
        yield made
    finally:
        made.stop()
