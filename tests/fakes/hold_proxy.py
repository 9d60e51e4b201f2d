# SPDX-License-Identifier: Apache-2.0
"""A proxy that passes bytes through, and can stop a client's n-th message of one kind."""

import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from tests.fakes.zmtp_proxy import COMMAND, Message, ZmtpProxy, encoded, ending, messages_after_greeting


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


class HoldProxy(ZmtpProxy):
    """See the module; ``hold`` may be called from the test's thread at any time."""

    def __init__(self, front: Path, back: Path) -> None:
        super().__init__(front, back)
        self._holds: list[Hold] = []

    def hold(self, tag: str, nth: int = 1) -> Hold:
        """Stop the *nth* message from now on whose request has this tag, and what follows it on its connection."""
        hold = Hold(tag, nth)
        with self._lock:
            self._holds.append(hold)
        return hold

    def _let_go(self) -> None:
        with self._lock:
            holds = [*self._holds]
        for hold in holds:
            hold.release()

    def _directions(self, client: socket.socket, server: socket.socket) -> list[Callable[[], None]]:
        return [partial(self._up, client, server), partial(self._down, server, client)]

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        """Client to server, message by message."""
        with ending(client, server), client.makefile("rb") as source:
            for message in messages_after_greeting(source, server):
                if (hold := self._match(message)) is not None:
                    hold.held.set()
                    hold.released.wait()
                server.sendall(encoded(message))

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        with ending(client, server):
            while data := server.recv(1 << 18):
                client.sendall(data)

    def _match(self, message: Message) -> Hold | None:
        tag = _tag(message)
        with self._lock:
            for hold in self._holds:
                if hold.tag == tag and hold.left > 0:
                    hold.left -= 1
                    if not hold.left:
                        return hold
        return None


def _tag(message: Message) -> str:
    """Tag of the request in a message; empty for anything else."""
    if len(message) < 2 or message[0][0][0] & COMMAND:
        return ""
    try:
        body = msgspec.msgpack.decode(message[1][1])
    except (msgspec.MsgspecError, ValueError):
        return ""
    return body.get("type", "") if isinstance(body, dict) else ""
