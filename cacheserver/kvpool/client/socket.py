# SPDX-License-Identifier: Apache-2.0
"""The client's one door to ZeroMQ: connections that live once, and a wait that other threads can cut short.

A connection never reconnects by itself: whoever lost one makes a fresh one. So an address that flaps, or a server that
was replaced behind it, can hang nothing, and what was queued for the old server never reaches the new one.
"""

import contextlib
import os
import threading
from collections.abc import Container, Sequence
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvpool.client.call import Frame
from kvpool.client.names import Names

__all__ = ["HANDSHAKE_SHARE", "Connection", "Door"]

HANDSHAKE_SHARE: Final = 3
"""A server that was reached may take so many times ``connect_s`` to answer: on a busy node every attempt would be cut
off before its end otherwise, however often it is repeated."""

_ENDINGS: Final[dict[int, str]] = {
    zmq.EVENT_DISCONNECTED: "the server closed the connection",
    zmq.EVENT_CLOSED: "nobody listens at this address",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the connection broke in its handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the encrypted handshake failed; is server_key this server's?",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server refused the encrypted handshake",
}

_COPY_LIMIT_BYTES: Final = 64 << 10
"""Frames below this are copied by ZeroMQ, which is cheaper than tracking them."""


# As plain numbers: every operation on the enumerations' members costs some microseconds.
_AT_ONCE: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE: Final = int(zmq.POLLIN)


class Connection:
    """One DEALER connection; used by the thread that made it, alone."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        server_key: str,
        connect_s: float,
    ) -> None:
        self.heard = False
        """True once a message came: the address is good."""
        self.six = address.startswith("tcp://[")
        self._socket = context.socket(zmq.DEALER)
        self._socket.ipv6 = self.six
        self._socket.linger = 0
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, int(connect_s * 1000)))
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, int(HANDSHAKE_SHARE * connect_s * 1000)))
        if server_key:
            public, secret = zmq.curve_keypair()
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
            self._socket.curve_serverkey = server_key.encode()
        self._monitor = self._socket.get_monitor_socket(sum(_ENDINGS))
        self._ended = ""
        self._alarmed = False
        self.readable = False
        """True if the last wait found a message."""
        try:
            self._socket.connect(address)
        except zmq.ZMQError as e:
            self._ended = f"the address cannot be used: {e}"

    def send(self, frames: Sequence[Frame]) -> bool:
        """Hand one message to ZeroMQ; False if its queue is full or the connection is gone. Never blocks."""
        *first, last = frames
        copy = all(len(f) < _COPY_LIMIT_BYTES for f in frames)
        try:
            for frame in first:
                self._socket.send(frame, _MORE, copy)
            self._socket.send(last, _AT_ONCE, copy)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[Frame] | None:
        """Return the next message, or None. Large frames are not copied."""
        # Asking first costs a third of what it costs to be told by an exception.
        if not int(self._socket.get(zmq.EVENTS)) & _READABLE:
            return None
        frame = self._socket.recv(_AT_ONCE, copy=False)
        frames = [_content(frame)]
        while frame.more:
            frame = self._socket.recv(_AT_ONCE, copy=False)
            frames.append(_content(frame))
        self.heard = True
        return frames

    @property
    def alarmed(self) -> bool:
        """True if the last wait found news of the connection itself: ``ended`` says which."""
        return self._alarmed or bool(self._ended)

    def note(self, found: Container[object]) -> None:
        """Learn what a wait found; the Door alone calls this."""
        self.readable, self._alarmed = self._socket in found, self._monitor in found

    def ended(self) -> str:
        """Return why the connection is over, or an empty text while it is not."""
        while not self._ended:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            self._ended = _ENDINGS.get(event["event"], "")
        return self._ended

    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What a Door waits on."""
        return self._socket, self._monitor

    def close(self) -> None:
        """Drop the connection and all that was queued for it; idempotent, does not wait."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


class Door:
    """The ZeroMQ context of one Link, with a wake-up that any thread may give."""

    def __init__(self, names: Names | None = None) -> None:
        self._names = names or Names()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._lock = threading.Lock()
        self._closed = False
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watched: tuple[Connection, ...] = ()
        self._latest: dict[str, Connection] = {}
        """The last connection to each host."""
        self._poller = self._watch(())

    def connect(self, address: str, server_key: str, connect_s: float) -> Connection:
        """Begin a connection; returns at once, and ``Connection.ended`` tells if it fails.

        A name may lead to several addresses, also of either family: the next attempt after one that failed takes the
        next one.

        Raises:
            ServerUnavailable: the name service does not say where the address is.
        """
        host = address.rpartition(":")[0]
        former = self._latest.get(host)
        failed = former is not None and not former.heard
        address = self._names.numeric(address, failed=failed, wait_s=connect_s)
        made = self._latest[host] = Connection(self._context, address, server_key, connect_s)
        return made

    def wake(self) -> None:
        """End the running or the next ``wait``; any thread, nothing happens after ``close``."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)

    def wait(self, connections: tuple[Connection, ...], timeout_s: float) -> None:
        """Return when a connection has news (which it then knows of), somebody wakes, or time is up."""
        if connections != self._watched:
            self._poller, self._watched = self._watch(connections), connections
        # Rounded up: a wait that ends just before a deadline would spin until it.
        found = dict(self._poller.poll(max(0, int(timeout_s * 1000) + 1)))
        for connection in connections:
            connection.note(found)
        if self._wakeup in found:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)

    def close(self) -> None:
        """Close the context and whatever connection is left. Idempotent; by the thread that used it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wakeup)
        self._context.destroy(linger=0)

    def _watch(self, connections: tuple[Connection, ...]) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        for connection in connections:
            for socket in connection.sockets():
                poller.register(socket, zmq.POLLIN)
        return poller


def _content(frame: zmq.Frame) -> Frame:
    return frame.bytes if len(frame) < _COPY_LIMIT_BYTES else frame.buffer
