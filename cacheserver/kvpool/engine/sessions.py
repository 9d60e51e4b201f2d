# SPDX-License-Identifier: Apache-2.0
"""Live requests: nothing is kept of one but its lookup, and that it has not ended."""

from dataclasses import dataclass

from kvpool.index.deadlines import Deadlines
from kvpool.index.tombstones import Tombstones
from kvpool.model.errors import Busy

__all__ = ["Session", "Sessions"]


@dataclass(slots=True)
class Session:
    """One request of one client."""

    lookup_id: bytes | None = None
    """Its live lookup."""


class Sessions:
    """Sessions by client and request. Only lookups open one: a store is bounded by its own lease."""

    def __init__(self, most: int, idle_s: float, ended: Tombstones) -> None:
        """Keep at most *most*; one without a lookup is forgotten after *idle_s*. *ended* remembers early ends."""
        self._most = most
        self._idle_s = idle_s
        self._ended = ended
        self._count = 0
        self._of_client: dict[bytes, dict[str, Session]] = {}
        self._idle: Deadlines[tuple[bytes, str]] = Deadlines()

    def __len__(self) -> int:
        return self._count

    def open(self, client_id: bytes, request_id: str, now_s: float) -> Session | None:
        """Return the session of a request, new if there was none; None if its end came first.

        Raises:
            Busy: as many requests are alive as the server keeps.
        """
        if self._ended.take((client_id, request_id), now_s):
            return None
        sessions = self._of_client.setdefault(client_id, {})
        session = sessions.get(request_id)
        if session is None:
            if self._count >= self._most:
                raise Busy(f"{self._count} requests are alive, and the server keeps no more")
            session = sessions[request_id] = Session()
            self._count += 1
        self._idle.set((client_id, request_id), now_s + self._idle_s)
        return session

    def get(self, client_id: bytes, request_id: str) -> Session | None:
        """Return a known session."""
        return self._of_client.get(client_id, {}).get(request_id)

    def end(self, client_id: bytes, request_id: str, now_s: float) -> Session | None:
        """Forget a session and return it; an unknown one leaves a tombstone."""
        session = self._forget(client_id, request_id)
        if session is None:
            self._ended.leave((client_id, request_id), now_s)
        return session

    def forget_client(self, client_id: bytes) -> None:
        """Forget all sessions of a client."""
        for request_id in list(self._of_client.get(client_id, ())):
            self._forget(client_id, request_id)

    def expire(self, now_s: float) -> None:
        """Forget sessions that are idle for too long (one with a live lookup is not idle), and ends of long ago."""
        self._ended.expire(now_s)
        for client_id, request_id in self._idle.pop_due(now_s):
            session = self.get(client_id, request_id)
            if session is not None and session.lookup_id is not None:
                self._idle.set((client_id, request_id), now_s + self._idle_s)
            else:
                self._forget(client_id, request_id)

    def next_s(self) -> float | None:
        """Return when ``expire`` has something to do next."""
        times_s = [t for t in (self._idle.next_s(), self._ended.next_s()) if t is not None]
        return min(times_s, default=None)

    def _forget(self, client_id: bytes, request_id: str) -> Session | None:
        sessions = self._of_client.get(client_id, {})
        session = sessions.pop(request_id, None)
        if session is not None:
            self._count -= 1
            self._idle.drop((client_id, request_id))
        if not sessions:
            self._of_client.pop(client_id, None)
        return session
