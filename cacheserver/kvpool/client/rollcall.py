# SPDX-License-Identifier: Apache-2.0
"""Asks several servers who they are: the next one soon after the one before, so that one that hangs hides none."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Final

from msgspec.structs import replace

from kvpool.client.call import Call
from kvpool.client.credential import read_server_key
from kvpool.client.pipe import Pipe
from kvpool.client.socket import HANDSHAKE_SHARE, Door
from kvpool.config import ClientConfig
from kvpool.model.errors import CacheError, ServerUnavailable
from kvpool.wire.messages import Hello, Welcome

__all__ = ["Answered", "who_they_are"]

Answered = tuple[str, str | CacheError]
"""An address, and the id of the server there or why it is not known."""

_NEXT_S: Final = 0.1
"""How long a server is waited for before the next one is asked, too: those that are well answer in less."""


@dataclass(slots=True)
class _Asked:
    """One server that was asked."""

    address: str
    pipe: Pipe
    call: Call[Welcome]

    def turn(self, now_s: float) -> None:
        """Take in what came."""
        connection = self.pipe.connection
        if connection.alarmed or connection.readable:
            for _ in self.pipe.replies():
                pass
        self.pipe.expire(now_s)
        if connection.alarmed and (ended := connection.ended()):
            self.call.fail(ServerUnavailable(ended))

    def close(self) -> Answered:
        """Hang up; returns what was said until now."""
        self.pipe.close(ServerUnavailable("nobody waits for the answer any more"))
        error = self.call.error()
        return self.address, self.call.result()[0].server_id if error is None else error


def who_they_are(
    door: Door, config: ClientConfig, hello: Callable[[], Hello], addresses: Iterable[str], given_up: Callable[[], bool]
) -> Generator[Answered, None, None]:
    """Ask the servers at *addresses* for their ids; yields each answer as it comes.

    Whatever they do, it is over ``HANDSHAKE_SHARE * connect_s`` after the last one was asked. Whoever has heard enough
    closes the generator.

    Args:
        door: of the link's thread, which has no other connection now.
        config: how servers are reached; its ``server`` does not matter.
        hello: makes the question, a probe's, for each server another one.
        addresses: in the order in which they are asked.
        given_up: whether to end early, after a wake-up of the Door.

    Raises:
        ServerUnavailable: given up.
    """
    waiting, asked, next_s = deque(addresses), list[_Asked](), 0.0
    try:
        while waiting or asked:
            if given_up():
                raise ServerUnavailable("the link is being closed")
            now_s = monotonic()
            if waiting and (not asked or now_s >= next_s):
                address, next_s = waiting.popleft(), now_s + _NEXT_S
                try:
                    asked.append(_ask(door, replace(config, server=address), hello()))
                except ServerUnavailable as e:
                    yield address, e
                continue
            ends_s = min([a.call.deadline_s for a in asked] + [next_s] * bool(waiting))
            door.wait(tuple(a.pipe.connection for a in asked), max(0.0, ends_s - now_s))
            for one in asked:
                one.turn(monotonic())
            for one in [a for a in asked if a.call.done()]:
                asked.remove(one)
                next_s = 0.0
                yield one.close()
    finally:
        for one in asked:
            one.close()


def _ask(door: Door, config: ClientConfig, hello: Hello) -> _Asked:
    now_s = monotonic()
    call: Call[Welcome] = Call(hello, (), now_s + HANDSHAKE_SHARE * config.connect_s)
    pipe = Pipe(door.connect(config.server, read_server_key(config), config.connect_s), 1, config.transfer_s)
    pipe.send_now(call, now_s)
    return _Asked(config.server, pipe, call)
