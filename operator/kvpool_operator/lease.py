# SPDX-License-Identifier: Apache-2.0
"""Who works: one replica holds a Lease, the others wait.

Expiry is judged by how long *we* have seen the record unchanged, on our own clock, never by the times in it. Only one
of two writers wins, since both send the version that they read. A lost Lease ends the process: the cleanest fence.
"""

import asyncio
import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvpool_operator.cluster import LEASES, Cluster
from kvpool_operator.errors import Absent, Conflict, OperatorError

__all__ = ["LEASE", "Lease", "LeaseLostError"]

LEASE: Final = "kvpool-operator"
_RETRY_S: Final = 2.0


class LeaseLostError(RuntimeError):
    """The Lease could not be renewed in time; the process must end."""


@dataclass(slots=True)
class _Seen:
    version: str = ""
    since_s: float = 0.0


class Lease:
    """The Lease of one namespace, for one candidate. One event loop.

    Args:
        identity: name of this candidate.
        lease_s: a record unchanged for this long is nobody's any more.
        clock: monotonic seconds. *wall*: the time to write down, for people.
        name: of the Lease.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        identity: str,
        lease_s: float,
        clock: Callable[[], float],
        wall: Callable[[], dt.datetime],
        name: str = LEASE,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._lease_s = lease_s
        self._clock = clock
        self._wall = wall
        self._seen = _Seen()
        self._held_s = 0.0
        self.held = False

    async def acquire(self) -> None:
        """Return once this candidate holds the Lease; an API server that is away is waited for."""
        while not await self._try():  # noqa: ASYNC110 - the holder does not tell us
            await asyncio.sleep(min(_RETRY_S, self._lease_s / 4))

    async def keep(self) -> None:
        """Renew until cancelled.

        Raises:
            LeaseLostError: it was taken, or could not be renewed for two thirds of its time.
        """
        while True:
            await asyncio.sleep(min(_RETRY_S, self._lease_s / 4))
            if await self._try():
                continue
            if not self.held or self._clock() - self._held_s > self._lease_s * 2 / 3:
                self.held = False
                raise LeaseLostError(f"lease {self._name} in {self._namespace} is not ours any more")

    async def release(self) -> None:
        """Let the next candidate in at once; failing to is harmless, the Lease runs out."""
        if not self.held:
            return
        self.held = False
        try:
            found = await self._cluster.get(LEASES, self._namespace, self._name)
            if found["spec"].get("holderIdentity") == self._identity:
                found["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._cluster.replace(LEASES, found)
        except OperatorError:
            return

    async def _try(self) -> bool:
        """Take or renew once; False if somebody else holds it or the API server did not answer."""
        try:
            return await self._take()
        except OperatorError:
            return False

    async def _take(self) -> bool:
        try:
            found = await self._cluster.get(LEASES, self._namespace, self._name)
        except Absent:
            body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": {"name": self._name}}
            if not await self._cluster.create(LEASES, self._namespace, {**body, "spec": self._spec(0)}):
                return False
            return self._hold()
        holder, version = found["spec"].get("holderIdentity"), found["metadata"]["resourceVersion"]
        if holder and holder != self._identity and not self._lapsed(version):
            self.held = False
            return False
        turns = found["spec"].get("leaseTransitions", 0) + (holder != self._identity)
        try:
            await self._cluster.replace(LEASES, {**found, "spec": self._spec(turns)})
        except Conflict:
            return False
        return self._hold()

    def _hold(self) -> bool:
        self.held, self._held_s = True, self._clock()
        return True

    def _lapsed(self, version: str) -> bool:
        """True once the same record has been seen for a whole lease time."""
        now_s = self._clock()
        if self._seen.version != version:
            self._seen = _Seen(version, now_s)
        return now_s - self._seen.since_s > self._lease_s

    def _spec(self, turns: int) -> dict[str, Any]:
        now = self._wall().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._lease_s)),
            "renewTime": now,
            "leaseTransitions": turns,
        }
