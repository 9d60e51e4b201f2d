# SPDX-License-Identifier: Apache-2.0
"""All pools as the API server last told: a list, then a watch, and the list again whenever the watch breaks."""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvpool_operator.cluster import POOLS, Cluster
from kvpool_operator.errors import InvalidPool, OperatorError
from kvpool_operator.spec import Pool, parse_pool, parse_status

__all__ = ["Known", "Pools"]

_log = logging.getLogger("kvpool.webhook")
_LONGEST_REST_S: Final = 30.0

Known = tuple[Pool, str]
"""A pool and its public key, which is empty before there is one."""


class Pools:
    """What admission looks pools up in; no call of the API server on the way. One event loop.

    Args:
        namespaces: namespaces with pools; empty for all.
    """

    def __init__(self, cluster: Cluster, namespaces: Sequence[str]) -> None:
        self._cluster = cluster
        self._namespaces = tuple(namespaces) or ("",)
        self._known: dict[str, dict[tuple[str, str], Known]] = {}

    @property
    def synced(self) -> bool:
        """True once every namespace was listed."""
        return len(self._known) == len(self._namespaces)

    def get(self, key: tuple[str, str]) -> Known | None:
        """The pool of *key* (namespace and name); None if there is none, or its spec cannot be read."""
        return next((found[key] for found in self._known.values() if key in found), None)

    async def run(self) -> None:
        """Follow the API server until cancelled. While it is away the last answer stays."""
        async with asyncio.TaskGroup() as tasks:
            for namespace in self._namespaces:
                tasks.create_task(self._follow(namespace))

    async def _follow(self, namespace: str) -> None:
        rest_s = 0.0
        while True:
            try:
                await self._once(namespace)
                rest_s = 0.0
            except OperatorError as e:
                rest_s = min(_LONGEST_REST_S, max(0.5, 2 * rest_s))
                _log.warning("pools.unseen", extra={"fields": {"namespace": namespace, "error": str(e)}})
                await asyncio.sleep(rest_s * random.uniform(0.5, 1.0))  # noqa: S311 - spread, not secret

    async def _once(self, namespace: str) -> None:
        """One list and one watch, to the watch's end."""
        items, version = await self._cluster.snapshot(POOLS, namespace)
        self._known[namespace] = {key: known for item in items if (known := _read(item)) for key in [known[0].key]}
        while True:
            async for kind, body in self._cluster.watch(POOLS, namespace, version):
                version = body["metadata"]["resourceVersion"]
                if kind != "BOOKMARK":
                    self._note(namespace, kind, body)

    def _note(self, namespace: str, kind: str, body: Mapping[str, Any]) -> None:
        metadata, found = body["metadata"], self._known[namespace]
        known = _read(body)
        if kind == "DELETED" or known is None:
            found.pop((metadata["namespace"], metadata["name"]), None)
        else:
            found[known[0].key] = known


def _read(body: Mapping[str, Any]) -> Known | None:
    try:
        return parse_pool(body), parse_status(body).server_key
    except InvalidPool as e:
        _log.warning("pool.invalid", extra={"fields": {"name": body["metadata"]["name"], "error": str(e)}})
        return None
