# SPDX-License-Identifier: Apache-2.0
"""A Unix socket in front of a server's that passes bytes through, and can stop a client's n-th message of one kind.

It works below ZeroMQ, on the frames of its wire protocol (ZMTP 3, unencrypted), so that each end sees the other one's
death as without it. The descriptor socket is reached through a link beside it.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from kvpool.wire.descriptors import SUFFIX

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4


class Hold:
    """One message that is (to be) stopped."""

    def __init__(self, tag: str, nth: int) -> None:
        self.tag = tag
        self.left = nth
        self.held = threading.Event()
        """Set once the message is here and not yet at the server."""
        self.released = threading.Event()

    def wait_held(self, timeout_s: float) -> None:
        """Wait until the message has come."""
        assert self.held.wait(timeout_s), f"no {self.tag} came within {timeout_s} s"

    def release(self) -> None:
        """Let it go on."""
        self.released.set()


class HoldProxy:
    """See the module; a context manager. ``hold`` may be called from the test's thread at any time."""

    def __init__(self, front: Path, back: Path) -> None:
        self._front = front
        self._back = back
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._holds: list[Hold] = []
        self._sockets: list[socket.socket] = []
        self._closing = False
        self.address = f"ipc://{front}"

    def __enter__(self) -> Self:
        self._listener.bind(str(self._front))
        self._listener.listen()
        Path(f"{self._front}{SUFFIX}").symlink_to(f"{self._back}{SUFFIX}")
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closing = True
            sockets = [*self._sockets, self._listener]
            holds = [*self._holds]
        for hold in holds:
            hold.release()
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def hold(self, tag: str, nth: int = 1) -> Hold:
        """Stop the *nth* message from now on whose request has this tag, and what follows it on its connection."""
        hold = Hold(tag, nth)
        with self._lock:
            self._holds.append(hold)
        return hold

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                with self._lock:
                    if self._closing:
                        return
                    self._sockets += [client, server]
                try:
                    server.connect(str(self._back))
                except OSError:
                    client.close()
                    continue
                threading.Thread(target=self._up, args=(client, server), daemon=True).start()
                threading.Thread(target=self._down, args=(server, client), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        """Client to server, message by message."""
        with ending(client, server), client.makefile("rb") as source:
            greeting = GREETING_BYTES
            while greeting:  # each end sends the rest of its own once it has seen the beginning of the other's
                data = source.read1(greeting)
                if not data:
                    return
                server.sendall(data)
                greeting -= len(data)
            for message in messages(source):
                if (hold := self._match(message)) is not None:
                    hold.held.set()
                    hold.released.wait()
                server.sendall(b"".join(head + body for head, body in message))

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        with ending(client, server):
            while data := server.recv(1 << 18):
                client.sendall(data)

    def _match(self, message: list[tuple[bytes, bytes]]) -> Hold | None:
        tag = _tag(message)
        with self._lock:
            for hold in self._holds:
                if hold.tag == tag and hold.left > 0:
                    hold.left -= 1
                    if not hold.left:
                        return hold
        return None


@contextlib.contextmanager
def ending(*ends: socket.socket) -> Iterator[None]:
    """When one direction ends, so does the connection."""
    with contextlib.suppress(OSError, EOFError):
        yield
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def messages(source) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield each message as (frame header, frame body) pairs."""
    message = []
    while flags := source.read(1):
        size = source.read(8 if flags[0] & LONG else 1)
        body = source.read(int.from_bytes(size, "big"))
        message.append((flags + size, body))
        if not flags[0] & MORE:
            yield message
            message = []


def _tag(message: list[tuple[bytes, bytes]]) -> str:
    """Tag of the request in a message; empty for anything else."""
    if len(message) < 2 or message[0][0][0] & COMMAND:
        return ""
    try:
        body = msgspec.msgpack.decode(message[1][1])
    except (msgspec.MsgspecError, ValueError):
        return ""
    return body.get("type", "") if isinstance(body, dict) else ""
