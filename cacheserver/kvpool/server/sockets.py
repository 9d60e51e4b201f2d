# SPDX-License-Identifier: Apache-2.0
"""The server's only door to zmq: ROUTER sockets, what comes in, what goes out.

One ROUTER for each way in. libzmq would let one ROUTER bind a Unix socket in plain and a TCP port with CURVE (options
count from the next bind on), but it does not tell which endpoint a message came through. Apart, the origin of a client
is a fact: a plain bulk port can never carry a Hello, and routing ids of one endpoint never meet those of another.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Final, NamedTuple

import zmq

from kvpool.config import LimitConfig
from kvpool.model.whereabouts import bracketed
from kvpool.server.paths import ListenError, SocketLock, claim, created_with

__all__ = ["Arrival", "Frontend", "Origin", "Peer", "Sent", "Unread", "curve_pair", "curve_public"]

Buffer = bytes | bytearray | memoryview

KEPT_FRAMES: Final = 8
"""More than any message has; what comes behind is counted and dropped."""

_MARGIN_BYTES: Final = 64 << 10
"""A frame that is a little too large is still read, so that it can be refused by name; beyond it zmq hangs up."""
_RECEIVE_QUEUE: Final = 64
"""Messages of one connection that wait in this process; the rest waits with its sender."""
_LINGER_MS: Final = 250
_HANDSHAKE_MS: Final = 10_000
_TCP_SILENT_MS: Final = 10_000

_MAPPED: Final = re.compile(r"\[::ffff:([0-9.]+)\]")
"""How zmq writes an address of the old family."""

# As plain numbers: every operation on the enumerations' members costs some microseconds.
_AT_ONCE: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE: Final = int(zmq.POLLIN)


class Origin(IntEnum):
    """Through which endpoint a peer came."""

    UNIX = 0
    TCP = 1
    PLAIN_BULK = 2


class Peer(NamedTuple):
    """One connection."""

    origin: Origin
    routing_id: bytes


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message as it came, without the routing id."""

    peer: Peer
    frames: list[memoryview]
    surplus: int = 0
    """Frames beyond ``KEPT_FRAMES``; they were dropped."""

    chose_its_id: bool = False
    """The peer chose its own routing id: it could choose the former one of somebody else, so nothing of it is heard."""


class Sent(Enum):
    """What became of a message that was to be sent."""

    SENT = "sent"
    GONE = "gone"
    """The connection is closed."""

    FULL = "full"
    """The peer does not read; nothing was sent."""


class Unread:
    """A large message on its way out: ``done`` once its bytes left this process (or its connection ended)."""

    def __init__(self, tracker: zmq.MessageTracker, size: int) -> None:
        self._tracker = tracker
        self.size = size
        """Its bytes."""

    @property
    def done(self) -> bool:
        """True when nothing of it waits here any more."""
        return self._tracker.done


class Frontend:
    """The bound ROUTER sockets and the poller. Thread: the loop's, for everything after the binds."""

    def __init__(self, limits: LimitConfig) -> None:
        self._limits = limits
        self._context = zmq.Context(io_threads=1)
        self._routers: dict[Origin, zmq.Socket[bytes]] = {}
        self._origins: dict[object, Origin] = {}
        self._poller = zmq.Poller()
        self._lock: SocketLock | None = None
        self._socket: Path | None = None
        """The bound Unix socket."""
        self.endpoints: list[str] = []

    def bind_unix(self, path: str, mode: int) -> None:
        """Listen on a Unix socket of permission bits *mode*.

        Raises:
            ListenError: the path cannot be taken.
        """
        self._lock = claim(path, mode)
        with created_with(mode):
            self._bind(self._router(Origin.UNIX), f"ipc://{path}", "listen.socket_path")
        self._socket = Path(path)

    def bind_curve(self, host: str, port: int, secret_key: bytes) -> None:
        """Listen on an encrypted TCP port; 0 takes a free one.

        Raises:
            ListenError: the address cannot be taken.
        """
        router = self._tcp_router(Origin.TCP)
        router.curve_server = True
        router.curve_secretkey = secret_key
        self._bind(router, _tcp(host, port), "listen.tcp_host and listen.tcp_port")

    def bind_plain_bulk(self, host: str, port: int) -> int:
        """Listen on an unencrypted TCP port for bulk connections, 0 takes a free one; returns the port.

        Raises:
            ListenError: the address cannot be taken.
        """
        self._bind(self._tcp_router(Origin.PLAIN_BULK), _tcp(host, port), "listen.plain_bulk_port")
        return int(self.endpoints[-1].rpartition(":")[2])

    def watch(self, fd: int) -> None:
        """Let ``wait`` end when *fd* is readable, too."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float) -> set[Origin | int]:
        """Return what is readable: origins and watched descriptors; empty after *timeout_s*."""
        # Rounded up: a timer must not find the loop awake a fraction of a millisecond too early.
        found = self._poller.poll(int(timeout_s * 1000) + 1 if timeout_s > 0 else 0)
        return {self._origins.get(source, source) for source, _ in found}

    def receive(self, origin: Origin, most: int) -> list[Arrival]:
        """Return up to *most* messages that wait at one endpoint; never blocks."""
        router = self._routers[origin]
        arrivals: list[Arrival] = []
        # Asking first costs a third of what it costs to be told by an exception.
        while len(arrivals) < most and int(router.get(zmq.EVENTS)) & _READABLE:
            if (arrival := _receive(router, origin)) is None:
                break
            arrivals.append(arrival)
        return arrivals

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> Sent:
        """Send one message; never blocks."""
        send = self._routers[peer.origin].send
        *first, last = frames
        try:
            send(peer.routing_id, _MORE)
            for frame in first:
                send(frame, _MORE)
            send(last, _AT_ONCE)
        except zmq.ZMQError as e:
            return _why(e)
        return Sent.SENT

    def send_large(self, peer: Peer, frames: Sequence[Buffer], large: Buffer) -> Sent | Unread:
        """Send one message whose last frame is *large* and must not change any more; never blocks, copies nothing."""
        router = self._routers[peer.origin]
        try:
            router.send_multipart((peer.routing_id, *frames), zmq.NOBLOCK | zmq.SNDMORE)
            tracker = router.send(large, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as e:
            return _why(e)
        assert tracker is not None
        return Unread(tracker, len(large))

    def close(self) -> None:
        """Close all; replies under way have a moment to leave. Idempotent."""
        for router in self._routers.values():
            router.close(_LINGER_MS)
        self._routers.clear()
        self._context.term()
        if self._socket is not None:
            # ZeroMQ leaves the file. Under the lock it is still ours; a client then sees at once that nobody is here.
            self._socket.unlink(missing_ok=True)
            self._socket = None
        if self._lock is not None:
            self._lock.close()

    def _router(self, origin: Origin) -> "zmq.Socket[bytes]":
        router = self._context.socket(zmq.ROUTER)
        # Without it a reply to somebody who left vanishes, and one to somebody who does not read is dropped unseen.
        router.router_mandatory = True
        router.maxmsgsize = self._limits.frame_bytes + _MARGIN_BYTES
        router.rcvhwm = _RECEIVE_QUEUE
        router.sndhwm = 2 * self._limits.in_flight
        router.handshake_ivl = _HANDSHAKE_MS
        self._routers[origin] = router
        self._origins[router] = origin
        self._poller.register(router, zmq.POLLIN)
        return router

    def _tcp_router(self, origin: Origin) -> "zmq.Socket[bytes]":
        router = self._router(origin)
        router.ipv6 = True
        # A peer whose host vanished never closes its connection.
        router.heartbeat_ivl = _TCP_SILENT_MS // 2
        router.heartbeat_timeout = _TCP_SILENT_MS
        router.heartbeat_ttl = _TCP_SILENT_MS
        return router

    def _bind(self, router: "zmq.Socket[bytes]", address: str, setting: str) -> None:
        try:
            router.bind(address)
        except zmq.ZMQError as e:
            raise ListenError(f"{setting}: {address}: {e.strerror}; free it or name another") from e
        bound = router.get(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.endpoints.append(_MAPPED.sub(r"\1", bound.rstrip(b"\0").decode()))


def curve_pair() -> tuple[bytes, bytes]:
    """Return a new (public, secret) CURVE key pair in Z85, 40 bytes each."""
    public, secret = zmq.curve_keypair()
    return public, secret


def curve_public(secret: bytes) -> bytes:
    """Return the public half of a secret key.

    Raises:
        ValueError: *secret* is no Z85 text of 40 bytes.
    """
    try:
        return zmq.curve_public(secret)
    except (zmq.ZMQError, ValueError) as e:
        raise ValueError("no CURVE secret key in Z85") from e


def _tcp(host: str, port: int) -> str:
    return f"tcp://{bracketed(host)}:{port or '*'}"


def _why(error: zmq.ZMQError) -> Sent:
    if error.errno == zmq.EAGAIN:
        return Sent.FULL
    if error.errno == zmq.EHOSTUNREACH:
        return Sent.GONE
    raise error


def _receive(router: "zmq.Socket[bytes]", origin: Origin) -> Arrival | None:
    try:
        routing_id = router.recv(_AT_ONCE, copy=False)
    except zmq.Again:
        return None
    frames: list[memoryview] = []
    surplus, last = 0, routing_id
    while last.more:
        last = router.recv(_AT_ONCE, copy=False)
        if len(frames) < KEPT_FRAMES:
            frames.append(last.buffer)
        else:
            surplus += 1
    return Arrival(Peer(origin, routing_id.bytes), frames, surplus, _chose_its_id(last))


def _chose_its_id(frame: zmq.Frame) -> bool:
    """True unless the handshake said that this peer has no routing id of its own."""
    try:
        return frame.get("Identity") != ""
    except zmq.ZMQError:  # a protocol too old to say
        return True
