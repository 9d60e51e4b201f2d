# SPDX-License-Identifier: Apache-2.0
"""Where named servers are: asked on threads of their own, so that a slow name service holds up nothing but itself.

ZeroMQ would look a name up within the time of each attempt to connect, one attempt after the other on its only thread:
with a name service that is slower than an attempt may be, no attempt would ever get through.
"""

import ipaddress
import math
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from kvpool.model.errors import ServerUnavailable
from kvpool.model.whereabouts import bracketed

__all__ = ["Names", "addresses_of"]

_FRESH_S: Final = 0.5
_KNOWN_WAIT_S: Final = 0.2
_SCHEME: Final = "tcp://"


def addresses_of(name: str) -> list[str]:
    """Return the addresses of *name* as the system orders them, each once.

    Raises:
        OSError: the name is not known, or the name service does not answer.
        ValueError: it cannot be a name.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(slots=True)
class _Known:
    """What is known of one name."""

    addresses: Sequence[str] = ()
    problem: str = ""
    asked_s: float = -math.inf
    answered: threading.Event = field(default_factory=threading.Event)
    current: str = ""
    """The address that was given out last."""


class Names:
    """Addresses of names. One thread asks; each name has at most one question under way.

    While the name service is slow or down, what it said last counts: most servers come back where they were.
    """

    def __init__(self, look_up: Callable[[str], Sequence[str]] = addresses_of) -> None:
        self._look_up = look_up
        self._known: dict[str, _Known] = {}

    def numeric(self, address: str, *, failed: bool, wait_s: float) -> str:
        """Return *address* with a number in place of its name; any other address as it is.

        Args:
            address: of a server.
            failed: what was returned last for its host did not lead to a server: take the next one.
            wait_s: for the name service, if nothing is known. The question goes on after that.

        Raises:
            ServerUnavailable: nothing is known of the name yet.
        """
        host, _, port = address.removeprefix(_SCHEME).rpartition(":")
        if not address.startswith(_SCHEME) or _is_number(host):
            return address
        addresses, known = self.addresses(host, wait_s), self._known[host]
        known.current = _choice(addresses, known.current, failed=failed)
        return f"{_SCHEME}{bracketed(known.current)}:{port}"

    def addresses(self, host: str, wait_s: float) -> tuple[str, ...]:
        """Return all addresses of a name, each once; those of last time while the name service is slow.

        Args:
            host: a name, or a number, which is its own address.
            wait_s: for the name service, if nothing is known. The question goes on after that.

        Raises:
            ServerUnavailable: nothing is known of the name yet.
        """
        known = self._known.setdefault(host, _Known())
        self._ask(host, known)
        known.answered.wait(_KNOWN_WAIT_S if known.addresses else wait_s)
        if not (addresses := tuple(known.addresses)):
            raise ServerUnavailable(known.problem or f"the name service has not said yet where {host} is")
        return addresses

    def _ask(self, host: str, known: _Known) -> None:
        now_s = monotonic()
        under_way = known.asked_s > -math.inf and not known.answered.is_set()
        if under_way or now_s - known.asked_s < _FRESH_S:
            return
        known.asked_s = now_s
        known.answered.clear()
        threading.Thread(target=self._answer, args=(host, known), name="kvpool-names", daemon=True).start()

    def _answer(self, host: str, known: _Known) -> None:
        try:
            known.addresses = self._look_up(host)
        except (OSError, ValueError) as e:  # no name at all is a UnicodeError, mostly
            known.problem = f"{host} cannot be resolved: {e}"
        finally:
            known.answered.set()


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _choice(addresses: Sequence[str], current: str, *, failed: bool) -> str:
    if current not in addresses:
        return addresses[0]
    return addresses[(addresses.index(current) + failed) % len(addresses)]
