# SPDX-License-Identifier: Apache-2.0
"""Which client speaks on which connection. Thread: the loop's."""

from collections.abc import Iterator

from kvpool.model.errors import Busy, IdentityRefused, UnknownLease
from kvpool.server.calls import Client
from kvpool.server.sockets import Peer

__all__ = ["Connections"]


class Connections:
    """All clients, by connection, id and ticket.

    A client has one control connection and any number of bulk ones. Another Hello of the same id is the same client
    after a reconnect: it gets a new ticket, and its former connections are unknown from then on.
    """

    def __init__(self, most: int, silent_s: float) -> None:
        self._most = most
        self._silent_s = silent_s
        self._by_peer: dict[Peer, Client] = {}
        self._by_id: dict[bytes, Client] = {}
        self._by_ticket: dict[bytes, Client] = {}
        self._looked_s: float | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._by_id.values()))

    def heard(self, peer: Peer, now_s: float) -> Client | None:
        """Return who speaks on *peer*, and note that it lives; None before its Hello."""
        client = self._by_peer.get(peer)
        if client is not None:
            client.seen_s = now_s
        return client

    def is_bulk(self, peer: Peer) -> bool:
        """True if *peer* is the bulk connection of a client."""
        client = self._by_peer.get(peer)
        return client is not None and peer in client.bulk

    def find(self, client_id: bytes) -> Client | None:
        """Return the client of that id."""
        return self._by_id.get(client_id)

    def check(self, client_id: bytes, tenant: str) -> None:
        """Check that a Hello of *client_id* may be answered.

        Raises:
            IdentityRefused: the id belongs to a client of another tenant.
            Busy: there are as many clients as there may be.
        """
        known = self._by_id.get(client_id)
        if known is None and len(self._by_id) >= self._most:
            raise Busy(f"{len(self._by_id)} clients are connected; at most {self._most}")
        if known is not None and known.tenant != tenant:
            raise IdentityRefused("this client id belongs to somebody else; choose a random one")

    def add(self, client: Client) -> list[Client]:
        """Take in a client that said Hello; returns those whose place it takes (same id, or same connection)."""
        former = [c for c in (self._by_id.get(client.client_id), self._by_peer.get(client.peer)) if c is not None]
        replaced = list(dict.fromkeys(former))
        for old in replaced:
            self.drop(old)
        self._by_id[client.client_id] = client
        self._by_ticket[client.ticket] = client
        self._by_peer[client.peer] = client
        return replaced

    def by_ticket(self, ticket: bytes) -> Client:
        """Return the client that was given *ticket*.

        Raises:
            UnknownLease: nobody was, or it was given out before the client's last Hello.
        """
        client = self._by_ticket.get(ticket)
        if client is None:
            raise UnknownLease("the ticket is not known; say Hello for a new one")
        return client

    def attach(self, client: Client, peer: Peer) -> None:
        """Make *peer* a bulk connection of *client*."""
        former = self._by_peer.get(peer)
        if former is not None and former is not client:
            former.bulk.discard(peer)
        client.bulk.add(peer)
        self._by_peer[peer] = client

    def drop(self, client: Client) -> None:
        """Forget *client* and its connections; idempotent."""
        for peer in (client.peer, *client.bulk):
            if self._by_peer.get(peer) is client:
                del self._by_peer[peer]
        if self._by_id.get(client.client_id) is client:
            del self._by_id[client.client_id]
        self._by_ticket.pop(client.ticket, None)

    def silent(self, now_s: float) -> list[Client]:
        """Return the clients that are taken for dead: not heard of for too long, and no process handle says better.

        Call it a few times within the allowed silence. After a longer gap it was this process that stood still, and
        everybody gets a new chance.
        """
        gap_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if gap_s > self._silent_s / 2:
            for client in self._by_id.values():
                client.seen_s = max(client.seen_s, now_s)
        return [c for c in self._by_id.values() if not c.watched and now_s - c.seen_s >= self._silent_s]
