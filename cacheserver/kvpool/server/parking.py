# SPDX-License-Identifier: Apache-2.0
"""Calls that wait for a lookup to become final. Thread: the loop's."""

import heapq
from itertools import count

from kvpool.server.calls import Call

__all__ = ["Parking"]


class Parking:
    """Parked calls by lookup id and by how long they wait; calls that ended in another way drop out by themselves."""

    def __init__(self) -> None:
        self._by_lookup: dict[bytes, set[Call]] = {}
        self._waits: list[tuple[float, int, bytes, Call]] = []
        self._sequence = count()

    def park(self, lookup_id: bytes, call: Call, until_s: float) -> None:
        """Keep *call* until its lookup changes, at most until *until_s*."""
        self._by_lookup.setdefault(lookup_id, set()).add(call)
        # A call whose own deadline comes first is answered there; it must not stay here longer.
        until_s = min(until_s, call.deadline_s)
        heapq.heappush(self._waits, (until_s, next(self._sequence), lookup_id, call))

    def of(self, lookup_id: bytes) -> list[Call]:
        """Return the calls that still wait for *lookup_id*."""
        return [call for call in self._by_lookup.get(lookup_id, ()) if not call.ended]

    def due(self, now_s: float) -> list[tuple[bytes, Call]]:
        """Remove and return the calls that waited long enough."""
        found = []
        while self._waits and self._waits[0][0] <= now_s:
            _, _, lookup_id, call = heapq.heappop(self._waits)
            waiting = self._by_lookup[lookup_id]
            waiting.discard(call)
            if not waiting:
                del self._by_lookup[lookup_id]
            if not call.ended:
                found.append((lookup_id, call))
        return found

    def next_deadline_s(self) -> float | None:
        """Return when ``due`` has something next."""
        return self._waits[0][0] if self._waits else None
