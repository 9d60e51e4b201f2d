# SPDX-License-Identifier: Apache-2.0
"""One Event for each condition of a pool that flips, and for each reason why an owner's pods are not wired."""

import contextlib
import datetime as dt
import hashlib
import uuid
from collections.abc import Callable
from typing import Any, Final

from kvpool_operator.cluster import EVENTS, PODS, POOLS, Cluster
from kvpool_operator.errors import OperatorError
from kvpool_operator.observed import ClientPod, Owner
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
        owner = Owner(api_version=POOLS.api_version, kind=POOLS.kind, name=pool.name, uid=pool.uid)
        bad = condition.status == _BAD.get(condition.type, "False")
        body = self._event(pool.namespace, owner, condition.reason, condition.message)
        body |= {"action": f"{condition.type}Is{condition.status}", "type": "Warning" if bad else "Normal"}
        await self._post(pool.namespace, f"{pool.name}.{uuid.uuid4().hex[:12]}", body)

    async def unwired(self, pod: ClientPod, reason: str, text: str) -> None:
        """Say on whoever makes *pod*, or on itself, why it is not wired, or what of it is left to a person.

        The name follows from what is said, so that saying it again, after a restart, changes nothing.
        """
        owner = pod.owner or Owner(api_version=PODS.api_version, kind=PODS.kind, name=pod.name, uid=pod.uid)
        digest = hashlib.sha256(f"{owner.uid} {reason}".encode()).hexdigest()[:12]
        body = self._event(pod.namespace, owner, reason, f"{pod.name}: {text}")
        body |= {"action": "Wiring", "type": "Normal" if pod.wired else "Warning"}
        await self._post(pod.namespace, f"{owner.name[:230]}.{digest}", body)

    def _event(self, namespace: str, about: Owner, reason: str, note: str) -> dict[str, Any]:
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "eventTime": self._wall().strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": "kvpool.dev/operator",
            "reportingInstance": self._identity[:128],
            "reason": reason,
            "note": note[:1000],
            "regarding": {
                "apiVersion": about.api_version,
                "kind": about.kind,
                "name": about.name,
                "namespace": namespace,
                "uid": about.uid,
            },
        }

    async def _post(self, namespace: str, name: str, body: dict[str, Any]) -> None:
        with contextlib.suppress(OperatorError):
            await self._cluster.create(EVENTS, namespace, {**body, "metadata": {"name": name, "namespace": namespace}})
