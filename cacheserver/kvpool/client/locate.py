# SPDX-License-Identifier: Apache-2.0
"""Finds one server of another node: ``tcp://host:port#ID`` is the one that says it is ID.

    what its worker told -> a name that lists all -> the own node's server -> a mounted list -> a configured list

The first that leads to the server counts. None of them is believed: each address is asked who it is, so an old list
costs time, never a wrong answer. All are asked again at each connection: a replaced server is found where it is now.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.client.rollcall import Answered
from kvpool.config import ClientConfig
from kvpool.model.errors import CacheError, ServerUnavailable
from kvpool.model.whereabouts import MARK, bracketed, candidates

__all__ = ["ANYWHERE", "Clues", "Locator", "Source", "at", "sources"]

ANYWHERE: Final = "anywhere"
"""Address of a server of which only the id is known."""

Source = Callable[[str], Sequence[str]]
"""From a server's id to addresses where it may be; raises CacheError if it cannot tell."""

Identify = Callable[[Sequence[str]], Generator[Answered, None, None]]


@dataclass(frozen=True, slots=True)
class Clues:
    """What is known of a server of another node beside the configuration."""

    told: str = ""
    """Address that its worker told; empty if only the worker's own machine can use it."""

    home: str = ""
    """Address of the server of this node, which may know the others."""


def at(address: str, server_id: str) -> str:
    """The address of the server *server_id* among all that the host of *address* lists."""
    return f"{address or ANYWHERE}{MARK}{server_id}"


def sources(
    config: ClientConfig,
    clues: Clues,
    look_up: Callable[[str], Sequence[str]],
    ask: Callable[[str, str], Sequence[str]],
) -> list[Source]:
    """Return what to look into for a server of another node, in order.

    Args:
        config: whose ``server`` is that server's ``at``.
        clues: what else is known.
        look_up: returns the addresses of a host's name; raises CacheError.
        ask: asks the server at an address where the one of an id is.
    """
    name = config.server.partition(MARK)[0]
    found: list[Source] = []
    if clues.told and clues.told != clues.home:
        found.append(lambda _: [clues.told])
    if name != ANYWHERE:
        found.append(lambda _: _listed_by(name, look_up))
    if clues.home:
        found.append(lambda server_id: ask(clues.home, server_id))
    if config.servers_file:
        found.append(lambda server_id: _read(config.servers_file, server_id))
    if config.servers:
        found.append(lambda server_id: candidates(config.servers, server_id))
    return found


def _listed_by(name: str, look_up: Callable[[str], Sequence[str]]) -> list[str]:
    host, _, port = name.removeprefix("tcp://").rpartition(":")
    return [f"tcp://{bracketed(address)}:{port}" for address in sorted(look_up(host.strip("[]")))]


def _read(path: str, server_id: str) -> tuple[str, ...]:
    try:
        return candidates(Path(path).read_text().splitlines(), server_id)
    except (OSError, ValueError) as e:
        raise ServerUnavailable(f"{path} cannot be read: {e}") from e


class Locator:
    """Where the server of one address is now. One thread, the link's.

    Args:
        address: any address; those without an id are where they say.
        identify: asks addresses for their servers' ids; yields each answer as it comes.
        looked_into: what to look into for the others, in order.
    """

    def __init__(self, address: str, identify: Identify, looked_into: Sequence[Source] = ()) -> None:
        self._address, _, self._server_id = address.partition(MARK)
        self._identify = identify
        self._sources = looked_into
        self._last = ""

    def find(self) -> str:
        """Return the address to connect to now; of what one source lists, that of last time is asked first.

        Raises:
            ServerUnavailable: no server of that id answers.
        """
        if not self._server_id:
            return self._address
        asked: set[str] = set()
        problems: list[str] = []
        for source in self._sources:
            try:
                listed = source(self._server_id)
            except CacheError as e:
                problems.append(str(e))
                continue
            new = [address for address in listed if address not in asked]
            asked.update(new)
            if found := self._among(new, problems):
                return found
        why = "".join(f"; {problem}" for problem in dict.fromkeys(problems))
        raise ServerUnavailable(f"none of the {len(asked)} servers that were asked is {self._server_id}{why}")

    def _among(self, listed: Sequence[str], problems: list[str]) -> str:
        """Return the one of *listed* that is the server; empty if none is."""
        problem = ""
        with closing(self._identify(sorted(listed, key=lambda a: a != self._last))) as answers:
            for address, answer in answers:
                if answer == self._server_id:
                    self._last = address
                    return address
                if isinstance(answer, CacheError):
                    problem = f"one did not answer: {answer}"
        problems += [problem] if problem else []
        return ""
