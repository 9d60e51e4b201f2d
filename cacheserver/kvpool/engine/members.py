# SPDX-License-Identifier: Apache-2.0
"""Clients coming and going."""

from collections.abc import Sequence

from kvpool.engine.clients import Client
from kvpool.engine.core import Core
from kvpool.engine.lookup import Lookups
from kvpool.engine.outcomes import Access
from kvpool.engine.registry import Registry
from kvpool.engine.release import Releases
from kvpool.model.errors import Malformed
from kvpool.model.identity import ClientKind, GroupSpec, Mode, Namespace, Role

__all__ = ["Members"]


class Members:
    """The verbs hello, register and unregister, and the ways in which a client gets lost."""

    def __init__(self, core: Core, releases: Releases, lookups: Lookups) -> None:
        """Work on *core* and the verbs that end things."""
        self._core = core
        self._releases = releases
        self._lookups = lookups
        self._registry = Registry(core)

    def hello(self, client_id: bytes, kind: ClientKind, role: Role, tenant: str, label: str, now_s: float) -> None:
        """Learn of a client, new or again."""
        if not any(client_id):
            raise Malformed("a client id of zeros stands for nobody")
        if self._core.clients.check_tenant(client_id, tenant):
            self._releases.leave(client_id)
        self._core.clients.add(client_id, kind, role, tenant, label, now_s)
        # It waited for its copies and dropped its mappings before it said Hello, also those of a former server.
        self._core.clients.unmapped(client_id)
        self._releases.writes_over(client_id, tenant)
        self._lookups.arrivals()

    def register(
        self,
        client: Client,
        namespace: Namespace,
        groups: tuple[GroupSpec, ...],
        shards: Sequence[int],
        readers: int,
        mode: Mode,
    ) -> None:
        """Learn what a client caches."""
        self._registry.register(client, namespace, groups, shards, readers, mode)
        self._lookups.arrivals()

    def unregister(self, client_id: bytes) -> bool:
        """End a client that says that its writes are over and its mappings gone."""
        known = self._releases.leave(client_id)
        if known:
            self._core.clients.unmapped(client_id)
            self._releases.writes_over(client_id)
        self._lookups.arrivals()
        return known

    def lost(self, client_id: bytes, *, proven_dead: bool) -> None:
        """End a client whose connection is gone."""
        self._releases.leave(client_id)
        if proven_dead:
            self.proven_dead(client_id)
        self._lookups.arrivals()

    def proven_dead(self, client_id: bytes) -> None:
        """Free all that only a client's process could still touch."""
        self._core.clients.unmapped(client_id)
        self._releases.writes_over(client_id)
        self._lookups.arrivals()

    def region_access(self, client_id: bytes, region: int) -> Access:
        """Say how a client may map a region, and note it."""
        client = self._core.clients.find(client_id)
        registration = client.registration if client else None
        if client is None or registration is None or registration.mode is not Mode.CLIENT_MOVED:
            return Access.NONE
        regions = self._core.index.regions
        cut = 0 <= region < self._core.arena.regions and regions.slot_bytes[region] > 0
        if not cut or regions.owner[region] != client.tenant:
            return Access.NONE
        self._core.clients.grant(client_id, region)
        return Access.WRITE if client.role.stores else Access.READ
