# SPDX-License-Identifier: Apache-2.0
"""A Unix socket in front of a server's that loses, delays, doubles, cuts and mixes up messages, by a seed.

It works on the messages of ZeroMQ's wire protocol, so that what arrives is always well formed below our own
protocol: a truncated message has a last frame that is too short. Handshakes pass untouched.
"""

import random
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.fakes.zmtp_proxy import COMMAND, LONG, Message, ZmtpProxy, encoded, ending, messages_after_greeting

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


class FaultProxy(ZmtpProxy):
    """See the module; ``calm`` and ``counts`` may be used from the test's thread at any time."""

    def __init__(self, front: Path, back: Path, seed: int, rates: Rates) -> None:
        super().__init__(front, back)
        self._rates = rates
        self._random = random.Random(seed)
        self._calm = False
        self.counts: Counter[str] = Counter()
        """Messages by what befell them."""

    def calm(self) -> None:
        """Pass everything on from now on."""
        self._calm = True

    def _directions(self, client: socket.socket, server: socket.socket) -> list[Callable[[], None]]:
        ends = ((client, server), (server, client))
        return [partial(self._relay, source, target, self._random.random()) for source, target in ends]

    def _relay(self, source: socket.socket, target: socket.socket, seed: float) -> None:
        """Pass one direction of one connection on."""
        chance = random.Random(seed)
        held: list[bytes] = []
        with ending(source, target), source.makefile("rb") as stream:
            for message in messages_after_greeting(stream, target):
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
