# SPDX-License-Identifier: Apache-2.0
"""A Unix socket in front of a server's, below ZeroMQ: connections, greetings and frames of its wire protocol.

What passes is ZMTP 3, unencrypted; each end sees the other one's death as without the proxy. The descriptor socket is
reached through a link beside it.
"""

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from kvpool.wire.descriptors import SUFFIX

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4

Message = list[tuple[bytes, bytes]]
"""Frames as (header, body)."""


class ZmtpProxy(ABC):
    """See the module; a context manager."""

    def __init__(self, front: Path, back: Path) -> None:
        self._front = front
        self._back = back
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._closing = threading.Event()
        self.address = f"ipc://{front}"

    def __enter__(self) -> Self:
        self._listener.bind(str(self._front))
        self._listener.listen()
        Path(f"{self._front}{SUFFIX}").symlink_to(f"{self._back}{SUFFIX}")
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closing.set()
            sockets = [*self._sockets, self._listener]
        self._let_go()
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    @abstractmethod
    def _directions(self, client: socket.socket, server: socket.socket) -> list[Callable[[], None]]:
        """What passes a new connection's two directions on, each on a thread of its own."""

    def _let_go(self) -> None:  # noqa: B027 - most hold nothing back
        """Release what waits, before the sockets are closed."""

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                with self._lock:
                    if self._closing.is_set():
                        client.close()
                        server.close()
                        return
                    self._sockets = [s for s in self._sockets if s.fileno() >= 0] + [client, server]
                try:
                    server.connect(str(self._back))
                except OSError:
                    client.close()
                    server.close()
                    continue
                for direction in self._directions(client, server):
                    threading.Thread(target=direction, daemon=True).start()


@contextlib.contextmanager
def ending(*ends: socket.socket) -> Iterator[None]:
    """When one direction ends, so does the connection."""
    with contextlib.suppress(OSError, EOFError):
        yield
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def messages_after_greeting(source, target: socket.socket) -> Iterator[Message]:
    """Pass the greeting on to *target*, then yield each message of *source*."""
    greeting = GREETING_BYTES
    while greeting:  # each end sends the rest of its own once it has seen the beginning of the other's
        data = source.read1(greeting)
        if not data:
            return
        target.sendall(data)
        greeting -= len(data)
    yield from messages(source)


def messages(source) -> Iterator[Message]:
    """Yield each message."""
    message: Message = []
    while flags := source.read(1):
        size = source.read(8 if flags[0] & LONG else 1)
        body = source.read(int.from_bytes(size, "big"))
        message.append((flags + size, body))
        if not flags[0] & MORE:
            yield message
            message = []


def encoded(message: Message) -> bytes:
    """Return a message as it stands in the stream."""
    return b"".join(head + body for head, body in message)
