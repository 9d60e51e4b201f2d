# SPDX-License-Identifier: Apache-2.0
"""Handlers of what concerns a client as a whole: Hello to Unregister, Ping, Stats, Clear. Thread: the loop's."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from kvpool._version import __version__
from kvpool.model.errors import IdentityRefused, LayoutRefused, LimitExceeded, SelfTestFailed
from kvpool.model.identity import Mode
from kvpool.model.keys import self_test
from kvpool.server.bulk import most_frames
from kvpool.server.calls import Answer, Call, Client
from kvpool.server.dispatch import Dispatcher, Place, Route
from kvpool.server.identity import Identity
from kvpool.server.parts import Parts
from kvpool.server.snapshot import ServerSnapshot
from kvpool.server.sockets import Origin
from kvpool.wire.messages import (
    AttachBulk,
    Attached,
    Clear,
    Cleared,
    Hello,
    Limits,
    Locate,
    Located,
    Ping,
    Pong,
    Register,
    Registered,
    Renew,
    Renewed,
    Statistics,
    Stats,
    Unregister,
    Unregistered,
    WatchRing,
    Welcome,
)
from kvpool.wire.versions import MOVING, agree

__all__ = ["Rim", "SessionVerbs"]

log = structlog.get_logger()

_TICKET_BYTES: Final = 16
_BULK_CONNECTIONS: Final = 8
_HAS_NONE: Final = "the client has none"
_APART: Final = "client and server share no Unix socket"
_SELF_TEST: Final = self_test()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rim:
    """What sessions need beside the shared parts."""

    wall: Callable[[], float]
    """Seconds since 1970, for tokens alone."""

    server_id: str
    descriptor_socket: str
    """Path of the socket that hands out segments; empty if there is none."""

    plain_bulk_port: int
    """TCP port for bulk connections without encryption; 0 if there is none."""

    watches: Callable[[bytes], bool]
    """Whether a process handle tells that the client of that id lives."""

    goodbye: Callable[[bytes], None]
    """Ends what the descriptor socket keeps of a client."""

    mover_listens: Callable[[Origin], str]
    """Where the next mover of a client that came this way listens."""

    neighbours: Callable[[str], tuple[str, ...]]
    """Where the pool's server of an id may be."""

    snapshot: Callable[[], ServerSnapshot]
    draining: Callable[[], bool]
    """Whether new work is refused."""


class SessionVerbs:
    """The handlers."""

    def __init__(self, parts: Parts, rim: Rim) -> None:
        self._parts = parts
        self._rim = rim

    def add_to(self, dispatcher: Dispatcher) -> None:
        """Route this class's requests."""
        dispatcher.add(Hello, Route(handler=self.hello, needs_hello=False, new_work=True))
        dispatcher.add(AttachBulk, Route(handler=self.attach_bulk, needs_hello=False, new_work=True, place=Place.BULK))
        dispatcher.add(Renew, Route(handler=self.renew, while_expired=True))
        dispatcher.add(Register, Route(handler=self.register, new_work=True))
        dispatcher.add(WatchRing, Route(handler=self.watch_ring, while_expired=True))
        dispatcher.add(Unregister, Route(handler=self.unregister, while_expired=True, releases=True))
        dispatcher.add(Clear, Route(handler=self.clear))
        dispatcher.add(Stats, Route(handler=self.stats))
        dispatcher.add(Locate, Route(handler=self.locate))
        dispatcher.add(Ping, Route(handler=self.ping, place=Place.ANY))

    def hello(self, call: Call, request: Hello) -> Answer:
        """Agree on a version, find out who it is, give it a ticket."""
        version = agree(request.version_min, request.version_max)
        if request.self_test != _SELF_TEST:
            raise SelfTestFailed("the client derives other digests than this server: its installation is damaged")
        identity = self._parts.authenticator.check(request.credential, self._rim.wall())
        self._parts.connections.check(request.client_id, identity.tenant)
        client = self._take_in(call, request, identity)
        call.client = client
        return Answer(self._welcome(client, version, identity))

    def attach_bulk(self, call: Call, request: AttachBulk) -> Answer:
        """Bind a connection to the client that was given the ticket."""
        client = self._parts.connections.by_ticket(request.ticket)
        if len(client.bulk) >= _BULK_CONNECTIONS and call.peer not in client.bulk:
            raise LimitExceeded(f"{len(client.bulk)} bulk connections; at most {_BULK_CONNECTIONS}")
        self._parts.connections.attach(client, call.peer)
        return Answer(Attached())

    def renew(self, call: Call, request: Renew) -> Answer:
        """Replace the credential."""
        client = call.owner
        identity = self._parts.authenticator.check(request.credential, self._rim.wall())
        if identity.tenant != client.tenant:
            raise IdentityRefused("the new credential is of another tenant; say Hello with another client id")
        client.expires_s = self._expiry(identity)
        return Answer(Renewed(identity_expires_s=self._told(identity)))

    def register(self, call: Call, request: Register) -> Answer:
        """Agree on how bytes move and tell the engine what this client caches."""
        client = call.owner
        mode, reason = _choose(request.modes, self._possible(client), self._missing(client, request))
        now_s = self._parts.clock()
        self._parts.engine.register(
            client.client_id, request.namespace, request.groups, request.shards, request.readers, mode, now_s
        )
        client.mode, client.mode_reason = mode, reason
        moved = {Mode.RING: request.ring, Mode.MAPPED: request.cache}.get(mode)
        if moved is not None:
            listen = self._rim.mover_listens(client.peer.origin)
            self._parts.rings.register(client.client_id, moved, request.process_id, listen)
        else:
            self._parts.rings.end(client.client_id, "the client registered again, without a ring")
        log.info(
            "client.registered",
            client=client.client_id.hex(),
            label=client.label,
            tenant=client.tenant,
            model=request.namespace.model,
            mode=mode.value,
            reason=reason,
        )
        return Answer(Registered(mode=mode, reason=reason))

    def watch_ring(self, call: Call, request: WatchRing) -> Answer | None:
        """Say how the client's ring stands, at once or when that changes."""
        return self._parts.rings.watch(call, request, self._parts.clock())

    def unregister(self, call: Call, _request: Unregister) -> Answer:
        """The client leaves and promises that all its writes are over."""
        client = call.owner
        known = self._parts.engine.unregister(client.client_id, self._parts.clock())
        self._parts.release(client)
        self._rim.goodbye(client.client_id)
        log.info("client.unregistered", client=client.client_id.hex(), label=client.label, tenant=client.tenant)
        return Answer(Unregistered(known=known))

    def clear(self, call: Call, request: Clear) -> Answer:
        """Drop chunks of the caller's tenant."""
        done = self._parts.engine.clear(call.owner.tenant, request.model, request.forced, self._parts.clock())
        log.info("chunks.cleared", tenant=call.owner.tenant, forced=request.forced, chunks=done.chunks, kept=done.kept)
        return Answer(Cleared(chunks=done.chunks, kept=done.kept))

    def stats(self, _call: Call, _request: Stats) -> Answer:
        """Numbers as they are now."""
        now = self._rim.snapshot()
        return Answer(
            Statistics(
                server_id=now.server_id,
                server_version=now.server_version,
                uptime_s=now.uptime_s,
                ready=now.ready,
                draining=now.draining,
                chunk_tokens=now.chunk_tokens,
                l1_bytes=now.l1_bytes,
                l1_used_bytes=now.l1_used_bytes,
                l1_pinned_bytes=now.l1_pinned_bytes,
                chunks=now.chunks,
                clients=now.clients,
                sessions=now.sessions,
                leases=now.leases,
                oldest_lease_s=now.oldest_lease_s,
                counters=dict(now.series),
            )
        )

    def locate(self, _call: Call, request: Locate) -> Answer:
        """Say where another server of the pool is, as far as the mounted list knows."""
        return Answer(Located(addresses=self._rim.neighbours(request.server_id)))

    def ping(self, _call: Call, _request: Ping) -> Answer:
        """The client lives, and so does the server."""
        return Answer(Pong(draining=self._rim.draining()))

    def _take_in(self, call: Call, request: Hello, identity: Identity) -> Client:
        parts = self._parts
        now_s = parts.clock()
        client = Client(
            client_id=request.client_id,
            kind=request.kind,
            tenant=identity.tenant,
            label=identity.label or request.label,
            ticket=secrets.token_bytes(_TICKET_BYTES),
            peer=call.peer,
            seen_s=now_s,
            expires_s=self._expiry(identity),
            namespace=identity.namespace,
        )
        self._make_room(client)
        parts.engine.hello(client.client_id, client.kind, request.role, client.tenant, client.label, now_s)
        client.watched = self._rim.watches(client.client_id)
        client.lane = parts.lanes.join()
        parts.connections.add(client)
        log.info(
            "client.admitted",
            client=client.client_id.hex(),
            label=client.label,
            tenant=client.tenant,
            kind=client.kind.value,
            version=request.client_version,
        )
        return client

    def _make_room(self, client: Client) -> None:
        """Let go of whom this client follows: itself before a reconnect, or somebody else on the same connection."""
        parts = self._parts
        before = parts.connections.find(client.client_id)
        if before is not None:
            parts.release(before)
        here = parts.connections.heard(client.peer, client.seen_s)
        if here is not None:
            parts.lose(here, "replaced")

    def _welcome(self, client: Client, version: int, identity: Identity) -> Welcome:
        config = self._parts.config
        limits, leases = config.limits, config.leases
        return Welcome(
            version=version,
            server_id=self._rim.server_id,
            server_version=__version__,
            chunk_tokens=config.chunk_tokens,
            tenant=client.tenant,
            limits=Limits(
                frame_bytes=limits.frame_bytes,
                chunks=limits.chunks,
                in_flight=limits.in_flight,
                bulk_window=limits.bulk_window,
                bulk_frames=most_frames(limits),
            ),
            heartbeat_s=leases.heartbeat_s,
            lookup_lease_s=leases.lookup_s,
            store_lease_s=leases.store_s,
            ticket=client.ticket,
            descriptor_socket=self._rim.descriptor_socket if client.peer.origin is Origin.UNIX else "",
            identity_expires_s=self._told(identity),
            plain_bulk_port=self._rim.plain_bulk_port if client.peer.origin is Origin.TCP else 0,
            features=(MOVING,),
        )

    def _expiry(self, identity: Identity) -> float | None:
        return None if identity.expires_in_s is None else self._parts.clock() + identity.expires_in_s

    def _told(self, identity: Identity) -> float | None:
        """What the client hears: without the allowed clock difference, so that it renews in time."""
        if identity.expires_in_s is None:
            return None
        return max(identity.expires_in_s - self._parts.config.auth.leeway_s, 0.0)

    def _missing(self, client: Client, request: Register) -> dict[Mode, str]:
        """Say why *request* gets no mover of a kind; nothing of those that it can have."""
        off = "" if self._parts.config.mover.ring else "switched off at this server (mover.ring)"
        ring = (request.no_ring or _HAS_NONE) if request.ring is None else off
        cache = "the client exports no cache" if request.cache is None else off
        if client.peer.origin is not Origin.UNIX:
            cache = _APART
        return {mode: why for mode, why in ((Mode.RING, ring), (Mode.MAPPED, cache)) if why}

    def _possible(self, client: Client) -> dict[Mode, str]:
        """Return the modes that this server can do with *client*, each with the reason."""
        possible = {
            Mode.RING: "the client has a ring; its mover says whether it can reach the device",
            Mode.MAPPED: "the client exports its cache; its mover says whether it can map it",
        }
        if client.peer.origin is Origin.UNIX and self._rim.descriptor_socket:
            return possible | {
                Mode.CLIENT_MOVED: "client and server share a Unix socket, so the client maps the segments itself",
                Mode.STREAMED: "the client asked for it",
            }
        return possible | {Mode.STREAMED: _APART}


def _choose(offered: Sequence[Mode], possible: dict[Mode, str], missing: dict[Mode, str]) -> tuple[Mode, str]:
    """Return the first mode that both can do, and why; also why a mover is *missing* that was asked for, or had failed.

    Raises:
        LayoutRefused: there is none.
    """
    if not offered:
        return Mode.STREAMED, "the client moves no bytes"
    for mode in offered:
        if mode in possible and mode not in missing:
            return mode, "; ".join((possible[mode], *_instead(mode, offered, missing)))
    raise LayoutRefused(f"the client moves bytes by {', '.join(offered)}, this server by {', '.join(possible)}")


def _instead(chosen: Mode, offered: Sequence[Mode], missing: dict[Mode, str]) -> Iterator[str]:
    no_ring = missing.get(Mode.RING, "")
    if chosen is not Mode.RING and no_ring and (Mode.RING in offered or no_ring != _HAS_NONE):
        yield f"no ring: {no_ring}"
    if Mode.MAPPED in missing and Mode.MAPPED in offered[: offered.index(chosen)]:
        yield f"not mapped: {missing[Mode.MAPPED]}"
