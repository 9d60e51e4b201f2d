# SPDX-License-Identifier: Apache-2.0
"""From a message to its handler: frame checks, who may ask what, and an answer for everything."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Never, TypeVar, get_args

import structlog

from kvpool.config import LimitConfig
from kvpool.metrics.catalogue import series_key
from kvpool.metrics.numbers import Numbers
from kvpool.model.errors import (
    Busy,
    CacheError,
    DeadlineExceeded,
    Draining,
    IdentityExpired,
    LimitExceeded,
    Malformed,
    NotRegistered,
    VersionMismatch,
)
from kvpool.model.keys import DIGEST_BYTES
from kvpool.server.calls import Answer, Call
from kvpool.server.connections import Connections
from kvpool.server.sockets import Arrival, Origin
from kvpool.wire import codec
from kvpool.wire.messages import AnyRequest, Failed, Hello, Request
from kvpool.wire.versions import VERSION_MAX, VERSION_MIN

__all__ = ["Dispatcher", "Place", "Route"]

log = structlog.get_logger()

Q = TypeVar("Q", bound=Request[Any])

_ENVELOPE_BYTES: Final = 64
_BODY_BYTES: Final = 64 << 10
"""Numbers and names only: whatever is large travels in raw frames. Keeps hostile bodies cheap to decode."""
_LONGEST_S: Final = 600.0
_HEAD_FRAMES: Final = 2


class Place(Enum):
    """Which kind of connection a request belongs on."""

    CONTROL = "control"
    BULK = "bulk"
    ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One request's handler and what must be true before it runs."""

    handler: Callable[[Call, Any], Answer | None]
    """Returns None when it will finish the call later."""

    frames: int = 0
    """Raw frames, exactly."""

    place: Place = Place.CONTROL
    needs_hello: bool = True
    new_work: bool = False
    """Refused while the server drains."""

    while_expired: bool = False
    """Runs although the client's identity has run out."""

    releases: bool = False
    """Gives something back: runs although it is late or too much is under way."""


class Dispatcher:
    """The table of all requests. Thread: the loop's."""

    def __init__(self, connections: Connections, limits: LimitConfig, numbers: Numbers) -> None:
        self._connections = connections
        self._limits = limits
        self._numbers = numbers
        self._queue_s = numbers.histogram("kvpool_queue_seconds")
        self._routes: dict[type[Request[Any]], Route] = {}
        self.draining = False

    def add(self, request: type[Q], route: Route) -> None:
        """Route *request*; twice is our own mistake."""
        assert request not in self._routes
        self._routes[request] = route

    def seal(self) -> None:
        """Check, once before serving, that every declared request has a handler.

        Raises:
            TypeError: one has none.
        """
        if missing := set(get_args(AnyRequest)) - self._routes.keys():
            raise TypeError(f"no handler for {', '.join(sorted(t.__name__ for t in missing))}")

    def answer(self, call: Call, arrival: Arrival, now_s: float) -> Answer | None:
        """Decode and run one request; never raises. None: the handler finishes the call later."""
        self._queue_s.observe(now_s - call.received_s)
        try:
            return self._run(call, arrival, now_s)
        except CacheError as e:
            return Answer(codec.encode_failure(e))
        except Exception:
            log.exception("request.crashed", request=call.tag)
            return Answer(Failed(code=CacheError.code, detail="a defect of the server; see its log"))

    def _run(self, call: Call, arrival: Arrival, now_s: float) -> Answer | None:
        version = self._read_envelope(call, arrival)
        request = self._read_body(arrival)
        call.tag = str(type(request).__struct_config__.tag)
        # Hello is how versions are agreed on, so its own envelope may be of any.
        if not isinstance(request, Hello) and not VERSION_MIN <= version <= VERSION_MAX:
            raise VersionMismatch(f"protocol {version}; this server speaks {VERSION_MIN} to {VERSION_MAX}")
        route = self._routes[type(request)]
        self._admit(call, route, now_s)
        self._take_frames(call, arrival, route)
        return route.handler(call, request)

    def _read_envelope(self, call: Call, arrival: Arrival) -> int:
        """Fill in what the envelope says, so that all that is wrong further in can be answered; returns the version."""
        frames = arrival.frames
        if not frames or len(frames[0]) > _ENVELOPE_BYTES:
            self._refuse("envelope", Malformed("the first frame is no envelope"))
        try:
            envelope = codec.decode_envelope(frames)
        except Malformed as e:
            self._refuse("envelope", e)
        call.number = envelope.request_id
        call.deadline_s = call.received_s + min(envelope.deadline_ms / 1000, _LONGEST_S)
        if arrival.chose_its_id:
            self._refuse("envelope", Malformed("the connection has a routing id of its own; leave it to the server"))
        return envelope.version

    def _read_body(self, arrival: Arrival) -> Request[Any]:
        body = arrival.frames[1]
        if len(body) > _BODY_BYTES:
            self._refuse("size", LimitExceeded(f"a body of {len(body)} bytes; at most {_BODY_BYTES}"))
        try:
            return codec.decode_request(body)
        except CacheError as e:
            self._refuse("body", e)

    def _refuse(self, reason: str, error: CacheError) -> Never:
        self._numbers.add(series_key("kvpool_refused_frames_total", reason=reason))
        raise error

    def _admit(self, call: Call, route: Route, now_s: float) -> None:
        """Check who asks, where, and when; fills in the client."""
        if call.peer.origin is Origin.PLAIN_BULK and route.place is Place.CONTROL:
            raise Malformed("this port is for bulk connections alone")
        call.client = self._connections.heard(call.peer, now_s)
        if route.needs_hello:
            self._admit_client(call, route, now_s)
        if self.draining and route.new_work:
            raise Draining("the server is shutting down")
        if now_s >= call.deadline_s and not route.releases:
            raise DeadlineExceeded("the request's time was over before it was read")

    def _admit_client(self, call: Call, route: Route, now_s: float) -> None:
        client = call.client
        if client is None:
            raise NotRegistered("no Hello on this connection since the server started")
        here = Place.BULK if call.peer in client.bulk else Place.CONTROL
        if route.place not in (here, Place.ANY):
            raise Malformed(f"a request for the {route.place.value} connection came on the {here.value} one")
        if client.expires_s is not None and now_s >= client.expires_s and not route.while_expired:
            raise IdentityExpired("the token that proved this client's identity ran out; send Renew")
        if len(client.open) >= self._limits.in_flight and not route.releases:
            raise Busy(f"{len(client.open)} requests of this client are under way; at most {self._limits.in_flight}")

    def _take_frames(self, call: Call, arrival: Arrival, route: Route) -> None:
        raw = arrival.frames[_HEAD_FRAMES:]
        if len(raw) + arrival.surplus != route.frames:
            count = len(raw) + arrival.surplus
            self._refuse("frames", Malformed(f"{call.tag} has {route.frames} raw frames, not {count}"))
        most = self._limits.frame_bytes if route.place is Place.BULK else self._limits.chunks * DIGEST_BYTES
        if any(len(frame) > most for frame in raw):
            self._refuse("size", LimitExceeded(f"{max(map(len, raw))} bytes in one frame; at most {most}"))
        call.frames = raw
