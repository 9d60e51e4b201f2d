# SPDX-License-Identifier: Apache-2.0
"""Finds one server among all that a name lists: ``tcp://host:port#ID`` is the one that says it is ID.

A pool's headless Service lists its servers' addresses, and a server's id is its node's name. So a scheduler reaches the
servers of its ranks on other nodes wherever they are now, without asking anybody but the name service and them.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.model.errors import CacheError, ServerUnavailable

__all__ = ["Locator", "at", "resolved"]

_MARK: Final = "#"


def at(address: str, server_id: str) -> str:
    """The address of the server *server_id* among all that the host of *address* lists."""
    return f"{address}{_MARK}{server_id}"


def resolved(host: str, port: int) -> list[str]:
    """Addresses of *host*, each once, in a stable order.

    Raises:
        ServerUnavailable: the name is not known, or lists nothing.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as e:
        raise ServerUnavailable(f"{host} cannot be resolved: {e}") from e
    hosts = sorted({str(entry[4][0]) for entry in found})
    return [f"tcp://{f'[{h}]' if ':' in h else h}:{port}" for h in hosts]


class Locator:
    """Where the server of one address is now. One thread, the link's.

    Args:
        address: any address; those without an id are where they say.
        identify: asks an address for its server's id.
        resolve: the name service.
    """

    def __init__(
        self,
        address: str,
        identify: Callable[[str], str],
        resolve: Callable[[str, int], Sequence[str]] = resolved,
    ) -> None:
        self._address, _, self._server_id = address.partition(_MARK)
        self._identify = identify
        self._resolve = resolve
        self._last = ""

    def find(self) -> str:
        """Return the address to connect to now; the one of last time is asked first.

        Raises:
            ServerUnavailable: no server of that id answers.
        """
        if not self._server_id:
            return self._address
        host, _, port = self._address.removeprefix("tcp://").rpartition(":")
        listed = self._resolve(host.strip("[]"), int(port))
        problem = ""
        for address in sorted(listed, key=lambda a: a != self._last):
            try:
                if self._identify(address) == self._server_id:
                    self._last = address
                    return address
            except CacheError as e:
                problem = f"; one did not answer: {e}"
        raise ServerUnavailable(f"none of the {len(listed)} servers of {host} is {self._server_id}{problem}")
