# SPDX-License-Identifier: Apache-2.0
"""Who goes first: requests that are only a few words pass those that bring or ask for much. Thread: the loop's.

A ping, a status, a release take some tens of microseconds; a lookup of a long prompt takes several times that, and a
loop that served all that waits before it looks again would let a ping wait for all of them.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kvpool.server.sockets import Arrival, Peer

__all__ = ["Backlog", "Waiting"]

_LIGHT_FRAMES: Final = 2
"""Envelope and body: no raw frame."""


class Waiting(NamedTuple):
    """A request that waits for its turn."""

    arrival: Arrival
    received_s: float


class Backlog:
    """Requests that have come and are not served yet: control before bulk, and each connection's in their order."""

    def __init__(self, is_bulk: Callable[[Peer], bool]) -> None:
        self._is_bulk = is_bulk
        self._control: deque[Waiting] = deque()
        self._bulk: deque[Waiting] = deque()
        self._behind: Counter[Peer] = Counter()
        """How many of each connection's requests wait."""

    def __len__(self) -> int:
        return len(self._control) + len(self._bulk)

    def sort(self, arrivals: Iterable[Arrival], received_s: float) -> list[Arrival]:
        """Return what is to be served at once; the rest waits here. Nothing passes what its own connection sent."""
        first = []
        for arrival in arrivals:
            bulk = self._is_bulk(arrival.peer)
            if not bulk and len(arrival.frames) <= _LIGHT_FRAMES and not self._behind[arrival.peer]:
                first.append(arrival)
            else:
                self._behind[arrival.peer] += 1
                (self._bulk if bulk else self._control).append(Waiting(arrival, received_s))
        return first

    def control(self) -> Waiting | None:
        """Take the next control request."""
        return self._take(self._control)

    def bulk(self) -> Waiting | None:
        """Take the next bulk request."""
        return self._take(self._bulk)

    def _take(self, queue: deque[Waiting]) -> Waiting | None:
        if not queue:
            return None
        waiting = queue.popleft()
        peer = waiting.arrival.peer
        self._behind[peer] -= 1
        if not self._behind[peer]:
            del self._behind[peer]
        return waiting
