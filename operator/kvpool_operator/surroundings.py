# SPDX-License-Identifier: Apache-2.0
"""What builders must know besides the pool, read from the cluster and kept for a while."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvpool_operator.cluster import NODES, POOLS, RUNTIME_CLASSES, Cluster
from kvpool_operator.desired import Facts
from kvpool_operator.settings import Settings

__all__ = ["Surroundings"]

T = TypeVar("T")

_MONITORING: Final = "monitoring.coreos.com/v1"
_GPU_COUNT_LABEL: Final = "nvidia.com/gpu.count"


@dataclass(slots=True)
class _Kept:
    value: Any
    read_s: float


class Surroundings:
    """Facts about the cluster, each read again after *keep_s*. One event loop."""

    def __init__(self, cluster: Cluster, settings: Settings, clock: Callable[[], float], keep_s: float = 60.0) -> None:
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._keep_s = keep_s
        self._kept: dict[str, _Kept] = {}

    def forget(self) -> None:
        """Read everything anew at the next call."""
        self._kept.clear()

    async def facts(self, server_key: str) -> Facts:
        """The facts for a pool whose public CURVE key is *server_key*.

        Raises:
            OperatorError: the API server did not answer.
        """
        issuer, keys = await self._keep("issuer", self._issuer)
        return Facts(
            image=self._settings.server_image,
            operator_namespace=self._settings.namespace,
            server_key=server_key,
            issuer=issuer,
            issuer_keys=keys,
            priority_class=self._settings.priority_class,
            runtime_classes=await self._keep("classes", self._runtime_classes),
            monitoring_kinds=await self._keep("monitoring", lambda: self._cluster.kinds(_MONITORING)),
            node_pools=await self._keep("pools", self._node_pools),
        )

    async def node_gpus(self) -> Mapping[str, int]:
        """How many GPUs each node has, as the labels of feature discovery promise.

        Raises:
            OperatorError: the API server did not answer.
        """
        return await self._keep("gpus", self._node_gpus)

    async def _node_gpus(self) -> dict[str, int]:
        found = await self._cluster.list(NODES, labels=_GPU_COUNT_LABEL, metadata_only=True)
        counts = {n["metadata"]["name"]: n["metadata"]["labels"][_GPU_COUNT_LABEL] for n in found}
        return {node: int(text) for node, text in counts.items() if text.isdigit()}

    async def _keep(self, name: str, read: Callable[[], Awaitable[T]]) -> T:
        kept = self._kept.get(name)
        if kept is None or self._clock() - kept.read_s > self._keep_s:
            kept = self._kept[name] = _Kept(await read(), self._clock())
        value: T = kept.value
        return value

    async def _issuer(self) -> tuple[str, str]:
        """The issuer of service-account tokens and its public keys, in a stable order."""
        known = json.loads(await self._cluster.read("/.well-known/openid-configuration"))
        keys = json.loads(await self._cluster.read("/openid/v1/jwks"))["keys"]
        ordered = sorted(keys, key=lambda k: str(k.get("kid", "")))
        return known["issuer"], json.dumps({"keys": ordered}, sort_keys=True)

    async def _runtime_classes(self) -> frozenset[str]:
        found = await self._cluster.list(RUNTIME_CLASSES, metadata_only=True)
        return frozenset(c["metadata"]["name"] for c in found)

    async def _node_pools(self) -> tuple[str, ...] | None:
        """Uids of all pools whose chunks stay on nodes; None if there may be some that this operator cannot see."""
        if self._settings.watch_namespaces:
            return None
        return tuple(sorted(p["metadata"]["uid"] for p in await self._cluster.list(POOLS) if _keeps_on_node(p)))


def _keeps_on_node(pool: dict[str, Any]) -> bool:
    return bool(pool.get("spec", {}).get("l1", {}).get("persistence") == "Node")
