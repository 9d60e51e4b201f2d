# SPDX-License-Identifier: Apache-2.0
"""Where keys live: a scope is one tenant's namespace, and has one table of digests for each group and shard."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from kvpool.model.identity import GroupSpec
from kvpool.model.slots import SERVER_OWNED, SlotArray

__all__ = ["KeyTable", "Scope", "Scopes"]


@dataclass(slots=True, eq=False)
class KeyTable:
    """The chunks of one scope, group and shard that are being written or readable."""

    number: int
    scope: "Scope"
    group: int
    shard: int
    slots: dict[bytes, int] = field(default_factory=dict)
    """Digest to slot."""

    def find(self, keys: list[bytes]) -> SlotArray:
        """Return the slot of each key, -1 where there is none."""
        return np.array(list(map(self.slots.get, keys, repeat(-1))), dtype=np.int64)

    def slot_of(self, key: bytes) -> int:
        """Return the slot of one key, or -1."""
        return self.slots.get(key, -1)


@dataclass(slots=True, eq=False)
class Scope:
    """One tenant's namespace."""

    digest: bytes
    tenant: str
    model: str
    groups: tuple[GroupSpec, ...] = ()
    """What was registered for it; empty until somebody registers."""

    home: str = SERVER_OWNED
    """Owner of the regions that chunks brought by a tier go to."""

    tables: dict[tuple[int, int], KeyTable] = field(default_factory=dict)
    """(group, shard) to table."""

    def empty(self) -> bool:
        """True if nothing of this scope is written or readable."""
        return not any(t.slots for t in self.tables.values())


class Scopes:
    """All scopes and tables. Tables have numbers, so that a slot's row can name its own."""

    def __init__(self) -> None:
        """Make an empty collection."""
        self._by_digest: dict[bytes, Scope] = {}
        self._tables: dict[int, KeyTable] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[Scope]:
        return iter(self._by_digest.values())

    def get(self, digest: bytes) -> Scope | None:
        """Return a scope that is known."""
        return self._by_digest.get(digest)

    def add(self, digest: bytes, tenant: str, model: str) -> Scope:
        """Return the scope of *digest*, new if it was not known."""
        return self._by_digest.setdefault(digest, Scope(digest, tenant, model))

    def drop(self, scope: Scope) -> None:
        """Forget a scope; it must be empty and no slot may name its tables."""
        del self._by_digest[scope.digest]
        for table in scope.tables.values():
            del self._tables[table.number]

    def table(self, scope: Scope, group: int, shard: int) -> KeyTable:
        """Return the table of one group and shard, new if there was none."""
        found = scope.tables.get((group, shard))
        if found is None:
            found = scope.tables[group, shard] = KeyTable(self._next, scope, group, shard)
            self._tables[self._next] = found
            self._next += 1
        return found

    def numbered(self, number: int) -> KeyTable:
        """Return a table by its number."""
        return self._tables[number]
