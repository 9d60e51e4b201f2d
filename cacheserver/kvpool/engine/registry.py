# SPDX-License-Identifier: Apache-2.0
"""Registration: which scope a client works in, and whether its layout can be kept."""

from collections.abc import Sequence

import msgspec
import numpy as np

from kvpool.engine.clients import Client, Registration, owner_for, slot_bytes_of
from kvpool.engine.core import Core
from kvpool.index.tables import KeyTable, Scope
from kvpool.model.errors import Busy, LayoutRefused
from kvpool.model.identity import GroupKind, GroupSpec, Mode, Namespace
from kvpool.model.keys import scope_digest

__all__ = ["Registry"]


class Registry:
    """The verb register."""

    def __init__(self, core: Core) -> None:
        """Work on *core*."""
        self._core = core

    def register(
        self,
        client: Client,
        namespace: Namespace,
        groups: tuple[GroupSpec, ...],
        shards: Sequence[int],
        readers: int,
        mode: Mode,
    ) -> None:
        """Bind a client to the scope of its tenant and namespace, in place of a former registration."""
        self._check_groups(groups)
        self._check_shards(namespace, shards, readers)
        scope = self._scope(client, namespace)
        if scope.groups != groups:
            self._regroup(client, scope, groups)
        if mode is Mode.CLIENT_MOVED:
            scope.home = client.tenant
        client.registration = Registration(
            scope, groups, frozenset(shards), readers, mode, owner_for(mode, client.tenant)
        )

    def _check_groups(self, groups: tuple[GroupSpec, ...]) -> None:
        if not groups:
            raise LayoutRefused("a layout needs at least one group")
        region_bytes = self._core.arena.region_bytes
        for number, spec in enumerate(groups):
            if spec.shard_bytes < 1 or slot_bytes_of(spec) > region_bytes:
                raise LayoutRefused(
                    f"group {number}: a piece of {spec.shard_bytes} bytes does not fit a segment of {region_bytes}"
                    " (l1.segment_bytes)"
                )
            if (spec.kind is GroupKind.WINDOW) != (spec.window_tokens > 0):
                raise LayoutRefused(f"group {number}: {spec.kind.value} with a window of {spec.window_tokens} tokens")

    def _check_shards(self, namespace: Namespace, shards: Sequence[int], readers: int) -> None:
        inside = all(0 <= s < namespace.shard_count for s in shards)
        if not shards or len(set(shards)) != len(shards) or not inside or readers < 1:
            raise LayoutRefused(
                f"shards {list(shards)} of {namespace.shard_count} with {readers} readers: each shard once, below the"
                " namespace's shard count, and at least one reader"
            )

    def _scope(self, client: Client, namespace: Namespace) -> Scope:
        digest = scope_digest(client.tenant, namespace)
        scopes = self._core.index.scopes
        known = scopes.get(digest)
        if known is None:
            if len(scopes) >= self._core.config.limits.namespaces:
                self._drop_unused()
            self._core.arena.remember_scope(digest, client.tenant, namespace.model, msgspec.msgpack.encode(namespace))
        return scopes.add(digest, client.tenant, namespace.model)

    def _drop_unused(self) -> None:
        unused = next((s for s in self._core.index.scopes if s.empty() and not self._core.clients.uses(s)), None)
        if unused is None:
            most = self._core.config.limits.namespaces
            raise Busy(f"{most} namespaces are in use, and the server keeps no more (limits.namespaces)")
        self._core.index.scopes.drop(unused)

    def _regroup(self, client: Client, scope: Scope, groups: tuple[GroupSpec, ...]) -> None:
        """Give a scope its groups. What a former server left under other ones is dropped."""
        if scope.groups and self._core.clients.uses(scope, but=client.client_id):
            raise LayoutRefused(f"this namespace is in use with {_sizes(scope.groups)}, not with {_sizes(groups)}")
        for table in scope.tables.values():
            if table.slots:
                self._drop_misfits(table, groups)
        scope.groups = groups

    def _drop_misfits(self, table: KeyTable, groups: tuple[GroupSpec, ...]) -> None:
        slots = np.fromiter(table.slots.values(), np.int64, len(table.slots))
        fits = np.zeros(len(slots), dtype=np.bool_)
        if table.group < len(groups):
            fits = self._core.arena.rows(slots)["length"] == groups[table.group].shard_bytes
        self._core.drop(slots[~fits])


def _sizes(groups: tuple[GroupSpec, ...]) -> str:
    return ", ".join(f"group {i}: {g.kind.value} of {g.shard_bytes} bytes" for i, g in enumerate(groups))
