# SPDX-License-Identifier: Apache-2.0
"""The clients that the engine knows, what they registered, and which regions they may have mapped."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.index.pins import PinLedger
from kvpool.index.regions import SlotClass
from kvpool.index.tables import Scope
from kvpool.model.errors import Busy, IdentityRefused, NotRegistered, RoleForbidden
from kvpool.model.identity import ClientKind, GroupKind, GroupSpec, Mode, Role
from kvpool.model.slots import SERVER_OWNED

__all__ = ["PAGE_BYTES", "Client", "Clients", "Registration", "group_reach", "owner_for", "slot_bytes_of"]

PAGE_BYTES = 4096


def slot_bytes_of(spec: GroupSpec) -> int:
    """Return the size of the slots that a group's pieces go to: whole pages, so that layouts share classes."""
    return -(-spec.shard_bytes // PAGE_BYTES) * PAGE_BYTES


def group_reach(spec: GroupSpec, chunk_tokens: int, asked: int) -> int:
    """Return how many chunks at the end of a prefix of at most *asked* chunks a group needs."""
    if spec.kind is GroupKind.WINDOW:
        return -(-spec.window_tokens // chunk_tokens)
    return 1 if spec.kind is GroupKind.STATE else max(asked, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """What a client caches and how its bytes move."""

    scope: Scope
    groups: tuple[GroupSpec, ...]
    shards: frozenset[int]
    readers: int
    mode: Mode
    owner: str
    """Owner of the regions that this client's stores go to."""

    def slot_class(self, group: int) -> SlotClass:
        """Return where one group's pieces go."""
        return SlotClass(slot_bytes_of(self.groups[group]), self.owner)


@dataclass(slots=True, eq=False)
class Client:
    """One client between its Hello and its end."""

    client_id: bytes
    kind: ClientKind
    role: Role
    tenant: str
    label: str
    ledger: PinLedger
    seen_s: float
    registration: Registration | None = None
    mover: bytes = b""
    """Id of the mover that carries this client's chunks; empty while the client or the server itself does."""

    @property
    def writer(self) -> bytes:
        """Who writes to the slots of this client's stores."""
        return self.mover or self.client_id

    def registered(self) -> Registration:
        """Return what the client registered.

        Raises:
            NotRegistered: it did not.
        """
        if self.registration is None:
            raise NotRegistered("the client said Hello, but did not register what it caches")
        return self.registration

    def loader(self) -> Registration:
        """As ``registered``, for a verb that looks up or loads.

        Raises:
            RoleForbidden: the client may store only.
        """
        if not self.role.loads:
            raise RoleForbidden(f"a {self.role.value} does not look up or load")
        return self.registered()

    def storer(self) -> Registration:
        """As ``registered``, for a verb that stores.

        Raises:
            RoleForbidden: the client may load only.
        """
        if not self.role.stores:
            raise RoleForbidden(f"a {self.role.value} does not store")
        return self.registered()


@dataclass(slots=True)
class Clients:
    """Clients by id."""

    most: int
    capacity: int
    """Slots that a pin ledger must cover."""

    _clients: dict[bytes, Client] = field(default_factory=dict)
    _grants: dict[bytes, set[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    def add(self, client_id: bytes, kind: ClientKind, role: Role, tenant: str, label: str, now_s: float) -> Client:
        """Keep a new client, in place of one with the same id.

        Raises:
            Busy: as many clients are here as the server keeps.
        """
        if client_id not in self._clients and len(self._clients) >= self.most:
            raise Busy(f"{len(self._clients)} clients are here, and the server keeps no more (limits.clients)")
        client = Client(client_id, kind, role, tenant, label, PinLedger(self.capacity), now_s)
        self._clients[client_id] = client
        return client

    def check_tenant(self, client_id: bytes, tenant: str) -> bool:
        """Return True if the id is known.

        Raises:
            IdentityRefused: another tenant's client has it.
        """
        client = self._clients.get(client_id)
        if client is not None and client.tenant != tenant:
            raise IdentityRefused("this client id belongs to another tenant")
        return client is not None

    def get(self, client_id: bytes, now_s: float) -> Client:
        """Return a client that calls now.

        Raises:
            NotRegistered: it said no Hello, or was lost since.
        """
        client = self._clients.get(client_id)
        if client is None:
            raise NotRegistered("the server does not know this client")
        client.seen_s = max(client.seen_s, now_s)
        return client

    def find(self, client_id: bytes) -> Client | None:
        """Return a client if it is known, without noting a call."""
        return self._clients.get(client_id)

    def remove(self, client_id: bytes) -> Client | None:
        """Forget a client, but not what it may have mapped."""
        return self._clients.pop(client_id, None)

    def uses(self, scope: Scope, but: bytes = b"") -> bool:
        """True if a client (other than *but*) is registered in a scope."""
        return any(
            c.registration is not None and c.registration.scope is scope and c.client_id != but
            for c in self._clients.values()
        )

    def grant(self, client_id: bytes, region: int) -> None:
        """Note that a client may map a region from now on."""
        self._grants.setdefault(client_id, set()).add(region)

    def granted(self, region: int) -> bool:
        """True if a client that is not proven dead may have mapped a region."""
        return any(region in regions for regions in self._grants.values())

    def unmapped(self, client_id: bytes) -> None:
        """Learn that nothing is mapped any more: its process is gone, or it says so. Writers are asked for besides."""
        self._grants.pop(client_id, None)


def owner_for(mode: Mode, tenant: str) -> str:
    """Return the owner of the regions that a client of *tenant* stores to."""
    return tenant if mode is Mode.CLIENT_MOVED else SERVER_OWNED
