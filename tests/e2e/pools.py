# SPDX-License-Identifier: Apache-2.0
"""Pools and their servers, as the stories use them."""

import json
from typing import Any

from tests.e2e.kube import Kube, Object

__all__ = ["OPERATIONS", "Servers", "pool"]

OPERATIONS = 7411
POOL_LABEL, ROLE_LABEL = "kvpool.dev/pool", "kvpool.dev/role"


def pool(namespace: str, name: str = "main", **spec: Any) -> Object:
    """A small pool for nodes without GPUs."""
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "l1": {"size": "256Mi"},
            "gpuAccess": {"mode": "None"},
            "placement": {"nodeSelector": {}},
            "resources": {"requests": {"cpu": "50m"}},
            "update": {"strategy": "Paced", "settle": "2s"},
            **spec,
        },
    }


class Servers:
    """The server pods of one pool."""

    def __init__(self, kube: Kube, namespace: str, name: str = "main") -> None:
        self.kube = kube
        self.namespace = namespace
        self.name = name

    def pods(self) -> dict[str, Object]:
        """The pods by node."""
        found = self.kube.all("pods", self.namespace, f"{POOL_LABEL}={self.name},{ROLE_LABEL}=server")
        return {p["spec"]["nodeName"]: p for p in found if "deletionTimestamp" not in p["metadata"]}

    def wait_ready(self, count: int = 2, deadline_s: float = 120.0) -> None:
        """Wait until the pool says that it is ready, with so many servers."""

        def ready() -> bool:
            status = self.kube.get("kvp", self.name, self.namespace)["status"]
            good = any(c["type"] == "Ready" and c["status"] == "True" for c in status["conditions"])
            return good and status["servers"]["ready"] == count

        self.kube.wait(f"pool {self.name} with {count} servers", ready, deadline_s)

    def wait_counted(self, clients: int, hit_tokens: int, deadline_s: float = 90.0) -> None:
        """Wait until the pool's status tells of so many wired clients and so many tokens found."""

        def told() -> bool:
            status = self.kube.get("kvp", self.name, self.namespace)["status"]
            wired = any(c["type"] == "ClientsWired" and c["status"] == "True" for c in status["conditions"])
            return wired and status["clients"] >= clients and status["traffic"]["hitTokens"] >= hit_tokens

        self.kube.wait("clients and hits in the status", told, deadline_s)

    def on(self, node: str) -> str:
        """Name of the pod on *node*."""
        return str(self.pods()[node]["metadata"]["name"])

    def statistics(self, node: str) -> dict[str, Any]:
        """What the server on *node* says of itself now; its first answer may be a second old."""
        first = self._published(node)["uptime_s"]
        return self.kube.wait("a new snapshot", lambda: (s := self._published(node))["uptime_s"] != first and s, 30)

    def _published(self, node: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kube.http_get(self.namespace, self.on(node), OPERATIONS, "/status"))
        return found

    def number(self, node: str, key: str) -> float:
        """Sum of the series of *node*'s server whose key begins with *key*."""
        series = self.statistics(node)["series"]
        return sum(v for k, v in series.items() if k.startswith(key))

    def wait_chunks(self, node: str, at_least: int) -> None:
        """Wait until the server on *node* holds so many chunks."""
        self.kube.wait(f"{at_least} chunks on {node}", lambda: self._published(node)["chunks"] >= at_least, 30)

    def wait_clients(self, node: str, count: int, mode: str) -> None:
        """Wait until so many clients of *node*'s server move bytes in *mode*."""
        key = f'kvpool_client_modes{{mode="{mode}"}}'
        self.kube.wait(f"{count} {mode} clients on {node}", lambda: self.number(node, key) >= count, 60)
