# SPDX-License-Identifier: Apache-2.0
"""One Event for each condition of a pool that flips; nothing else is posted."""

import contextlib
import datetime as dt
import uuid
from collections.abc import Callable
from typing import Final

from kvpool_operator.cluster import EVENTS, POOLS, Cluster
from kvpool_operator.errors import OperatorError
from kvpool_operator.spec import Condition, Pool

__all__ = ["Poster"]

_BAD: Final = {"Degraded": "True", "Progressing": "never"}
"""The status of a condition that is worth a warning, where it is not False."""


class Poster:
    """Posts Events. Losing one is harmless: the condition itself stands in the status."""

    def __init__(self, cluster: Cluster, identity: str, wall: Callable[[], dt.datetime]) -> None:
        self._cluster = cluster
        self._identity = identity
        self._wall = wall

    async def __call__(self, pool: Pool, condition: Condition) -> None:
        """Say on *pool* that *condition* has just flipped."""
        body = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": f"{pool.name}.{uuid.uuid4().hex[:12]}", "namespace": pool.namespace},
            "eventTime": self._wall().strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": "kvpool.dev/operator",
            "reportingInstance": self._identity[:128],
            "action": f"{condition.type}Is{condition.status}",
            "reason": condition.reason,
            "note": condition.message[:1000],
            "type": "Warning" if condition.status == _BAD.get(condition.type, "False") else "Normal",
            "regarding": {
                "apiVersion": POOLS.api_version,
                "kind": POOLS.kind,
                "name": pool.name,
                "namespace": pool.namespace,
                "uid": pool.uid,
            },
        }
        with contextlib.suppress(OperatorError):
            await self._cluster.create(EVENTS, pool.namespace, body)
