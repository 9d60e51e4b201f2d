# SPDX-License-Identifier: Apache-2.0
"""An engine over memory, and clients that speak to it as the server's handlers do."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tests.fakes.arena import PAGE, MemoryArena

from kvpool.config import L1Config, LeaseConfig, LimitConfig, ServerConfig
from kvpool.engine.engine import Engine
from kvpool.engine.outcomes import FoundPrefix
from kvpool.engine.ports import Arena, Tier
from kvpool.model.checksum import PREFERRED, checksum
from kvpool.model.identity import ClientKind, GroupKind, GroupSpec, Mode, Namespace, Role
from kvpool.model.slots import Disposition

FULL = (GroupSpec(kind=GroupKind.FULL, shard_bytes=PAGE),)


def namespace(model: str = "m", shard_count: int = 1, layout: str = "l") -> Namespace:
    return Namespace(
        model=model,
        model_fingerprint="f",
        dtype="d",
        kv_dtype="k",
        layout=layout,
        hash_algorithm="h",
        shard_count=shard_count,
    )


def config(**changes: object) -> ServerConfig:
    fields: dict[str, object] = {
        "chunk_tokens": 16,
        "l1": L1Config(evict_above=1.0, evict_to=1.0, verify_loads=0.0),
        "leases": LeaseConfig(lookup_s=60, store_s=60),
        "limits": LimitConfig(pinned_share=1.0, pinned_client_share=1.0),
    }
    return ServerConfig(**(fields | changes))  # type: ignore[arg-type]


def digests(*numbers: int, chain: int = 0) -> bytes:
    """One digest for each number; another *chain* has others."""
    return b"".join(chain.to_bytes(4, "little") + n.to_bytes(28, "little") for n in numbers)


def engine(arena: Arena | None = None, tiers: Sequence[Tier] = (), **changes: object) -> Engine:
    return Engine(config(**changes), arena or MemoryArena(), tiers)


_IDS = itertools.count(1)


def fresh_id() -> bytes:
    return next(_IDS).to_bytes(16, "big")


@dataclass
class FakeClient:
    """One client of an engine. Its writes go straight to the arena, as those of a client that maps it."""

    engine: Engine
    arena: MemoryArena
    mode: Mode = Mode.CLIENT_MOVED
    tenant: str = "t"
    kind: ClientKind = ClientKind.WORKER
    role: Role = Role.BOTH
    space: Namespace = field(default_factory=namespace)
    groups: tuple[GroupSpec, ...] = FULL
    shards: tuple[int, ...] = (0,)
    readers: int = 1
    client_id: bytes = field(default_factory=fresh_id)

    def join(self, now_s: float = 0.0) -> "FakeClient":
        self.engine.hello(self.client_id, self.kind, self.role, self.tenant, "label", now_s)
        self.engine.register(self.client_id, self.space, self.groups, self.shards, self.readers, self.mode, now_s)
        return self

    def prepare(
        self,
        keys: bytes,
        first: int = 0,
        group: int = 0,
        shard: int = 0,
        now_s: float = 0.0,
        parent: bytes = b"",
        store_id: bytes | None = None,
    ) -> tuple[bytes, NDArray[np.void]]:
        store_id = store_id or fresh_id()
        rows = self.engine.prepare_store(self.client_id, "r", store_id, group, shard, first, parent, keys, now_s)
        return store_id, rows

    def write(self, rows: NDArray[np.void], payload: bytes) -> bytes:
        """Put *payload* into all slots to be written; returns the checksums of all rows."""
        out = []
        for row in rows:
            if row["disposition"] == Disposition.WRITE:
                data = payload.ljust(int(row["length"]), b".")
                self.arena.view(int(row["slot"]))[: len(data)] = data
                out.append(checksum(data))
            else:
                out.append(bytes(16))
        return b"".join(out)

    def commit(self, store_id: bytes, rows: NDArray[np.void], sums: bytes = b"", now_s: float = 0.0) -> list[int]:
        marks = np.ones(len(rows), dtype=np.uint8)
        kind = PREFERRED if sums else 0
        return self.engine.commit_store(self.client_id, store_id, marks, sums, kind, now_s).tolist()

    def store(
        self, keys: bytes, payload: bytes = b"x", first: int = 0, group: int = 0, shard: int = 0, now_s: float = 0.0
    ) -> list[int]:
        """Store chunks from start to end."""
        store_id, rows = self.prepare(keys, first, group, shard, now_s)
        if not (rows["disposition"] == Disposition.WRITE).any():
            return rows["disposition"].tolist()
        return self.commit(store_id, rows, self.write(rows, payload), now_s)

    def lookup(
        self,
        keys: bytes,
        request_id: str = "q",
        lookup_id: bytes | None = None,
        shards: Sequence[int] | None = None,
        now_s: float = 0.0,
    ) -> tuple[bytes, FoundPrefix]:
        lookup_id = lookup_id or fresh_id()
        found = self.engine.lookup(self.client_id, request_id, lookup_id, shards or self.shards, keys, now_s)
        return lookup_id, found

    def found(self, keys: bytes, now_s: float = 0.0) -> int:
        """Length of the prefix that is there now; pins nothing in the end."""
        lookup_id, found = self.lookup(keys, f"probe-{fresh_id().hex()}", now_s=now_s)
        self.engine.free_lookup(self.client_id, lookup_id, 0, 1 << 31, now_s)
        return found.chunks

    def read(self, lookup_id: bytes, first: int, end: int, group: int = 0, shard: int = 0, now_s: float = 0.0):
        return self.engine.prepare_retrieve(self.client_id, lookup_id, group, shard, first, end, now_s)

    def vouch(
        self,
        lookup_id: bytes,
        first: int,
        end: int,
        group: int = 0,
        shard: int = 0,
        bad: Sequence[int] | None = None,
        now_s: float = 0.0,
    ) -> list[int]:
        marks = np.array(bad if bad is not None else [0] * (end - first), dtype=np.uint8)
        return self.engine.commit_retrieve(self.client_id, lookup_id, group, shard, first, end, marks, now_s).tolist()
