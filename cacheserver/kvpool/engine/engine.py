# SPDX-License-Identifier: Apache-2.0
"""The engine: every verb of the cache server, without sockets, clocks or files.

All calls come from one thread. ``now_s`` is the server's monotonic time. Verbs raise the errors of
``kvpool.model.errors``; beside those that they name:

* NotRegistered: every verb that names a client, if it said no Hello (or, where it matters, did not register);
* RoleForbidden: lookups and retrieves of a producer, stores of a consumer;
* InvalidRange: ids, groups, shards, chunks or pieces that nobody registered, asked for or reserved;
* UnknownLease: a lookup or store id that is not known: it ended, ran out, or never was;
* LimitExceeded and Busy: what asks for more than the limits of the configuration.

An ``IllegalMove`` out of a verb is a bug of ours; it is counted, and nothing is repaired.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.config import ServerConfig
from kvpool.engine.changes import Changes
from kvpool.engine.claims import MoverClaims
from kvpool.engine.clients import Client
from kvpool.engine.core import Core
from kvpool.engine.lookup import Lookups
from kvpool.engine.members import Members
from kvpool.engine.numbers import client_numbers, engine_numbers, scope_numbers
from kvpool.engine.outcomes import (
    Access,
    Cleared,
    ClientNumbers,
    EngineNumbers,
    FoundPrefix,
    ReadPlan,
    Recovery,
    ScopeNumbers,
)
from kvpool.engine.ports import Arena, Tier
from kvpool.engine.recovery import recover
from kvpool.engine.release import Releases
from kvpool.engine.retrieve import Retrieves
from kvpool.engine.room import Room
from kvpool.engine.store import Frame, Kinds, Stores
from kvpool.engine.tiers import Fetches
from kvpool.engine.upkeep import Upkeep
from kvpool.model.identity import ClientKind, GroupSpec, Mode, Namespace, Role

__all__ = ["Engine"]


class Engine:
    """Composes the verbs over one core."""

    def __init__(self, config: ServerConfig, arena: Arena, tiers: Sequence[Tier] = ()) -> None:
        """Serve chunks out of *arena*, and out of *tiers* in their order."""
        self._core = Core.build(config, arena)
        fetches = Fetches(self._core, tiers)
        self._lookups = Lookups(self._core, fetches)
        self._stores = Stores(self._core)
        self._retrieves = Retrieves(self._core, self._lookups)
        self._releases = Releases(self._core, self._lookups, self._stores)
        self._members = Members(self._core, self._releases, self._lookups)
        self.room = Room(self._core)
        self._upkeep = Upkeep(self._core, self._releases, self._lookups, fetches)
        self.changes = Changes(self._core)
        self.movers = MoverClaims(self._core, self._releases, self._lookups)

    def recover(self, now_s: float) -> Recovery:
        """Adopt what the arena found of a former server; call once, before serving."""
        self._note(now_s)
        return recover(self._core)

    # Clients

    def hello(self, client_id: bytes, kind: ClientKind, role: Role, tenant: str, label: str, now_s: float) -> None:
        """Learn of a client. A known id is the same client after a reconnect: it says by this that its copies ended.

        Raises:
            IdentityRefused: another tenant's client has this id.
            Busy: too many clients.
            Malformed: the id is all zeros, which stands for nobody.
        """
        self._note(now_s)
        self._members.hello(client_id, kind, role, tenant, label, now_s)

    def register(
        self,
        client_id: bytes,
        namespace: Namespace,
        groups: tuple[GroupSpec, ...],
        shards: Sequence[int],
        readers: int,
        mode: Mode,
        now_s: float,
    ) -> None:
        """Learn what a client caches and how its bytes move; a second call replaces the first.

        Raises:
            LayoutRefused: the layout cannot be kept; the text has the numbers.
            Busy: too many namespaces.
        """
        self._members.register(self._client(client_id, now_s), namespace, groups, shards, readers, mode)

    def unregister(self, client_id: bytes, now_s: float) -> bool:
        """End a client that says that all of its writes are over; False if it was not known."""
        self._note(now_s)
        return self._members.unregister(client_id)

    def client_lost(self, client_id: bytes, now_s: float, *, proven_dead: bool) -> None:
        """Learn that a client's connection is gone: its lookups end; slots it may still write to stay held."""
        self._note(now_s)
        self._members.lost(client_id, proven_dead=proven_dead)

    def writers_proven_dead(self, client_id: bytes, now_s: float) -> None:
        """Learn that a client's process does not exist any more."""
        self._note(now_s)
        self._members.proven_dead(client_id)

    def region_access(self, client_id: bytes, region: int) -> Access:
        """Say how a client may map a region; any answer but NONE is noted until the client is proven dead."""
        return self._members.region_access(client_id, region)

    # Lookups

    def lookup(
        self,
        client_id: bytes,
        request_id: str,
        lookup_id: bytes,
        shards: Sequence[int],
        digests: bytes | memoryview,
        now_s: float,
    ) -> FoundPrefix:
        """Find the longest prefix that all *shards* and all groups hold, and pin it for the lookup."""
        return self._lookups.lookup(self._client(client_id, now_s), request_id, lookup_id, shards, digests, now_s)

    def lookup_status(self, client_id: bytes, lookup_id: bytes, now_s: float) -> FoundPrefix:
        """Say how a lookup stands now. One that found nothing for good is over."""
        return self._lookups.status(self._client(client_id, now_s), lookup_id)

    def free_lookup(self, client_id: bytes, lookup_id: bytes, first: int, end: int, now_s: float) -> int:
        """Release chunks [first, end) of a lookup; returns of how many. Unknown ids leave a tombstone and give 0."""
        return self._releases.free_lookup(self._client(client_id, now_s), lookup_id, first, end, now_s)

    def take_resolved(self) -> list[bytes]:
        """Return the ids of lookups whose answer changed since the last call, also of waiting ones that ended."""
        return self._lookups.take_resolved()

    # Stores

    def prepare_store(  # noqa: PLR0913, PLR0917 - one argument for each field of the request
        self,
        client_id: bytes,
        request_id: str,  # noqa: ARG002 - a store is bounded by its lease alone, not by its request
        store_id: bytes,
        group: int,
        shard: int,
        first: int,
        parent: bytes,
        digests: bytes | memoryview,
        now_s: float,
    ) -> NDArray[np.void]:
        """Say for chunks [first, first + n) whether and where they go: ``PLACEMENT`` rows.

        A store of which nothing is to be written is over at once.
        """
        client = self._client(client_id, now_s)
        return self._stores.prepare(client, store_id, (group, shard, first), parent, digests, now_s)

    def begin_write(self, client_id: bytes, store_id: bytes, chunk: int, offset: int, length: int) -> memoryview:
        """Return the bytes that a streamed piece goes to; the copy holds the slot until ``end_write``."""
        return self._stores.begin_write(self._client(client_id, self._core.now_s), store_id, chunk, offset, length)

    def end_write(
        self, client_id: bytes, store_id: bytes, chunk: int, length: int, now_s: float, *, ok: bool = True
    ) -> None:
        """End the copy of one piece, also after its store or client ended; a chunk with a failed piece is not kept."""
        self._note(now_s)
        self._stores.end_write(client_id, store_id, chunk, length, ok=ok)

    def commit_store(
        self, client_id: bytes, store_id: bytes, complete: Frame, checksums: Frame, kind: Kinds, now_s: float
    ) -> NDArray[np.uint8]:
        """End a store: chunks marked 1 in *complete* become readable, the others go; *kind*: of all, or one a chunk.

        Returns:
            A disposition a chunk: STORED, ABANDONED, or what ``prepare_store`` said.

        Raises:
            Malformed: a frame has the wrong length, or the checksum kind is not known.
        """
        answer = self._stores.commit(self._client(client_id, now_s), store_id, complete, checksums, kind)
        self._lookups.arrivals()
        return answer

    # Retrieves

    def prepare_retrieve(
        self, client_id: bytes, lookup_id: bytes, group: int, shard: int, first: int, end: int, now_s: float
    ) -> ReadPlan:
        """Say where chunks [first, end) of a lookup lie; its deadline starts anew."""
        return self._retrieves.prepare(self._client(client_id, now_s), lookup_id, (group, shard), first, end, now_s)

    def begin_read(  # noqa: PLR0913, PLR0917 - as prepare_store
        self,
        client_id: bytes,
        lookup_id: bytes,
        group: int,
        shard: int,
        chunk: int,
        offset: int,
        length: int,
        now_s: float,
    ) -> Callable[[], bytes]:
        """Return what copies one piece, see ``Arena.read``; it holds the slot until ``end_read``. For any thread."""
        client = self._client(client_id, now_s)
        return self._retrieves.begin_read(client, (lookup_id, group, shard, chunk), offset, length)

    def end_read(  # noqa: PLR0913, PLR0917 - as prepare_store
        self,
        client_id: bytes,  # noqa: ARG002 - kept alike with begin_read; the client may be gone by now
        lookup_id: bytes,
        group: int,
        shard: int,
        chunk: int,
        offset: int,  # noqa: ARG002
        length: int,  # noqa: ARG002
        now_s: float,
    ) -> None:
        """End the copy of one piece, also after its lookup or client ended."""
        self._note(now_s)
        self._retrieves.end_read((lookup_id, group, shard, chunk))

    def commit_retrieve(  # noqa: PLR0913, PLR0917 - as prepare_store
        self,
        client_id: bytes,
        lookup_id: bytes,
        group: int,
        shard: int,
        first: int,
        end: int,
        bad: Frame,
        now_s: float,
    ) -> NDArray[np.uint8]:
        """End one reader's reading of chunks [first, end); those marked 1 in *bad* had a wrong checksum.

        Returns:
            VOUCHED or LOST a chunk; all LOST if the lookup ended or ran out.

        Raises:
            Malformed: *bad* has the wrong length.
        """
        client = self._client(client_id, now_s)
        marks = np.frombuffer(bad, dtype=np.uint8) == 1
        answer = self._retrieves.commit(client, lookup_id, (group, shard), first, end, marks)
        self._lookups.arrivals()
        return answer

    # Ends

    def end_request(self, client_id: bytes, request_id: str, now_s: float) -> int:
        """Release the lookup of a request; returns how many ended. An unknown request leaves a tombstone."""
        return self._releases.end_request(self._client(client_id, now_s), request_id, now_s)

    def clear(self, tenant: str | None, model: str, forced: bool, now_s: float) -> Cleared:
        """Drop the chunks of a tenant (None: of all) and model (empty: of all); *forced* drops held ones, too.

        The bytes under a reader or writer stay where they are until it is done, but nobody vouches for them.
        """
        self._note(now_s)
        cleared = self._releases.clear(tenant, model, forced=forced)
        self._lookups.arrivals()
        return cleared

    def tick(self, now_s: float) -> None:
        """Do what is due: expiries, tiers' completions, proofs about writers, a small batch of eviction."""
        self._note(now_s)
        self._upkeep.tick(now_s)

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do next; None if nothing is known."""
        return self._upkeep.next_s()

    def numbers(self) -> EngineNumbers:
        """Return the engine's numbers."""
        return engine_numbers(self._core)

    def clients(self, now_s: float) -> list[ClientNumbers]:
        """Return each client's numbers."""
        return [client_numbers(self._core, client, now_s) for client in self._core.clients]

    def scopes(self) -> list[ScopeNumbers]:
        """Return how much is kept of each model of each tenant."""
        return scope_numbers(self._core)

    def _client(self, client_id: bytes, now_s: float) -> Client:
        self._note(now_s)
        return self._core.clients.get(client_id, now_s)

    def _note(self, now_s: float) -> None:
        self._core.now_s = max(self._core.now_s, now_s)
