# SPDX-License-Identifier: Apache-2.0
"""A Unix socket in front of a server's that loses, delays, doubles, cuts and mixes up messages, by a seed.

It works on the messages of ZeroMQ's wire protocol, as ``hold_proxy`` does, so that what arrives is always well formed
below our own protocol: a truncated message has a last frame that is too short. Handshakes pass untouched.
"""

import contextlib
import random
import socket
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.fakes.hold_proxy import COMMAND, GREETING_BYTES, LONG, ending, messages

from kvpool.wire.descriptors import SUFFIX

Message = list[tuple[bytes, bytes]]

SHORT_BYTES = 255


@dataclass(frozen=True)
class Rates:
    """How often each fault befalls a message."""

    drop: float = 0.004
    delay: float = 0.01
    duplicate: float = 0.01
    truncate: float = 0.004
    reorder: float = 0.01
    hang_up: float = 0.001
    longest_delay_s: float = 0.05


class FaultProxy:
    """See the module; a context manager. ``calm`` and ``messages`` may be used from the test's thread at any time."""

    def __init__(self, front: Path, back: Path, seed: int, rates: Rates) -> None:
        self._front = front
        self._back = back
        self._rates = rates
        self._random = random.Random(seed)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._closing = threading.Event()
        self._calm = False
        self.counts: Counter[str] = Counter()
        """Messages by what befell them."""
        self.address = f"ipc://{front}"

    def __enter__(self) -> Self:
        self._listener.bind(str(self._front))
        self._listener.listen()
        Path(f"{self._front}{SUFFIX}").symlink_to(f"{self._back}{SUFFIX}")
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with self._lock:
            sockets = [*self._sockets, self._listener]
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def calm(self) -> None:
        """Pass everything on from now on."""
        self._calm = True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closing.is_set():
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                with self._lock:
                    self._sockets = [s for s in self._sockets if s.fileno() >= 0] + [client, server]
                try:
                    server.connect(str(self._back))
                except OSError:
                    client.close()
                    server.close()
                    continue
                for source, target in ((client, server), (server, client)):
                    seed = self._random.random()
                    threading.Thread(target=self._relay, args=(source, target, seed), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, seed: float) -> None:
        """Pass one direction of one connection on."""
        chance = random.Random(seed)
        held: list[bytes] = []
        with ending(source, target), source.makefile("rb") as stream:
            greeting = GREETING_BYTES
            while greeting:
                data = stream.read1(greeting)
                if not data:
                    return
                target.sendall(data)
                greeting -= len(data)
            for message in messages(stream):
                for data in self._befall(message, chance, held):
                    target.sendall(data)

    def _befall(self, message: Message, chance: random.Random, held: list[bytes]) -> list[bytes]:
        """Return what is to be sent now for *message*; what is *held* follows the next one."""
        whole = encoded(message)
        if message[0][0][0] & COMMAND or self._calm:
            return [whole, *taken(held)]
        what, rates = self._draw(chance), self._rates
        with self._lock:
            self.counts[what] += 1
        if what == "hang_up":
            raise OSError("the proxy hangs up")
        if what == "reorder":
            held.append(whole)
            return []
        if what == "delay":
            self._closing.wait(chance.uniform(0, rates.longest_delay_s))
        now = {"drop": [], "duplicate": [whole, whole], "truncate": [encoded(truncated(message, chance))]}
        return [*now.get(what, [whole]), *taken(held)]

    def _draw(self, chance: random.Random) -> str:
        at = chance.random()
        for what in ("drop", "delay", "duplicate", "truncate", "reorder", "hang_up"):
            at -= getattr(self._rates, what)
            if at < 0:
                return what
        return "passed"


def taken(held: list[bytes]) -> list[bytes]:
    """Empty *held* and return what was in it."""
    all_of_it = held[:]
    held.clear()
    return all_of_it


def truncated(message: Message, chance: random.Random) -> Message:
    """Return the message with a shorter last frame."""
    head, body = message[-1]
    shorter = body[: chance.randrange(len(body))] if body else body
    flags = head[0] & ~LONG | (LONG if len(shorter) > SHORT_BYTES else 0)
    size = len(shorter).to_bytes(8 if flags & LONG else 1, "big")
    return [*message[:-1], (bytes([flags]) + size, shorter)]


def encoded(message: Message) -> bytes:
    """Return a message as it stands in the stream."""
    return b"".join(head + body for head, body in message)
