# SPDX-License-Identifier: Apache-2.0
"""The movers of all clients: one for each that has a ring. Owned by the loop's thread, like everything it tells.

What a mover may still write to is held until its Revoked, or until it is reaped: ``turn`` returns both.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.mover.messages import Direction, Ring, Start
from kvpool.transfer.mover.supervision import MOVER_COMMAND, Mover, MoverLimits, MoverState

__all__ = ["MoverEvents", "Movers"]

_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class MoverEvents:
    """What happened since the last turn."""

    ready: list[tuple[bytes, str, bytes]] = field(default_factory=list)
    """Client, address and secret: the client may join now."""

    revoked: list[tuple[bytes, bytes, int]] = field(default_factory=list)
    """Client, grant and the bytes moved under it: no copy of it runs any more."""

    reaped: list[tuple[bytes, str]] = field(default_factory=list)
    """Client and reason: its mover writes nothing any more, whatever was granted to it."""


@dataclass(slots=True)
class _Kept:
    client_id: bytes
    mover: Mover
    secret: bytes
    given: set[int] = field(default_factory=set)
    announced: bool = False


class Movers:
    """Starts, feeds and ends movers. No call waits."""

    def __init__(
        self,
        listen: Callable[[bytes], str],
        descriptor: Callable[[int], tuple[int, int]],
        command: Sequence[str] = MOVER_COMMAND,
        limits: MoverLimits | None = None,
    ) -> None:
        """Keep no mover yet.

        Args:
            listen: client id to the address that its mover listens on.
            descriptor: memory number to a new writable descriptor of that memory and its length.
            command: the movers' program.
            limits: after these one is killed.
        """
        self._listen, self._descriptor = listen, descriptor
        self._command, self._limits = command, limits
        self._current: dict[bytes, _Kept] = {}
        self._ending: list[_Kept] = []

    def start(self, client_id: bytes, ring: Ring, client_pid: int, now_s: float) -> None:
        """Start a client's mover; the one it had, if any, is ended.

        Raises:
            OSError: no process can be had.
        """
        self.end(client_id, "the client registered again")
        secret = secrets.token_bytes(_SECRET_BYTES)
        start = Start(ring=ring, secret=secret, listen=self._listen(client_id))
        mover = Mover(self._command, start, client_pid, now_s, self._limits)
        self._current[client_id] = _Kept(client_id, mover, secret)

    def grant(self, client_id: bytes, grant: bytes, direction: Direction, rows: NDArray[np.void]) -> bool:
        """Let a client's mover move chunks (``PLACEMENT`` rows; disposition 0: not this one); False if it has none.

        Memory that the mover does not know yet is handed to it first.

        Raises:
            OSError: out of descriptors.
        """
        kept = self._current.get(client_id)
        if kept is None:
            return False
        for memory in np.unique(rows["memory"][rows["disposition"] != 0]).tolist():
            if memory not in kept.given:
                kept.mover.give_segment(memory, *self._descriptor(memory))
                kept.given.add(memory)
        kept.mover.grant(grant, direction, rows)
        return True

    def revoke(self, client_id: bytes, grant: bytes, now_s: float) -> bool:
        """End a grant; its end comes out of ``turn``. False if the client has no mover: then nothing runs."""
        kept = self._current.get(client_id)
        if kept is None:
            return False
        kept.mover.revoke(grant, now_s)
        return True

    def forget(self, memory: int) -> None:
        """Take memory back from all movers, after every grant with chunks in it has ended."""
        for kept in self._current.values():
            if memory in kept.given:
                kept.mover.take_segment(memory)
                kept.given.discard(memory)

    def end(self, client_id: bytes, reason: str) -> None:
        """Kill a client's mover; it is gone when ``turn`` says so. Idempotent."""
        kept = self._current.pop(client_id, None)
        if kept is not None:
            kept.mover.kill(reason)
            self._ending.append(kept)

    def end_all(self, reason: str) -> None:
        """Kill every mover."""
        for client_id in list(self._current):
            self.end(client_id, reason)

    def turn(self, now_s: float) -> MoverEvents:
        """Send, receive, look at deadlines and reap, for all movers."""
        events = MoverEvents()
        for kept in list(self._all()):
            events.revoked.extend((kept.client_id, r.grant, r.moved_bytes) for r in kept.mover.turn(now_s))
            self._note(kept, events)
        self._ending = [kept for kept in self._ending if kept.mover.state is not MoverState.REAPED]
        return events

    def filenos(self) -> list[int]:
        """Return what to wait for: a descriptor for each living mover."""
        return [kept.mover.fileno() for kept in self._current.values()]

    def next_deadline_s(self) -> float | None:
        """Return when ``turn`` has to be called at the latest; None: only when a descriptor is ready."""
        deadlines = (kept.mover.next_deadline_s() for kept in self._current.values())
        return min((d for d in deadlines if d is not None), default=None)

    def __len__(self) -> int:
        """Count those that exist, also as processes that were killed and are not reaped."""
        return len(self._current) + len(self._ending)

    def _all(self) -> Iterator[_Kept]:
        yield from self._current.values()
        yield from self._ending

    def _note(self, kept: _Kept, events: MoverEvents) -> None:
        mover = kept.mover
        if mover.state is MoverState.READY and not kept.announced:
            kept.announced = True
            events.ready.append((kept.client_id, mover.address, kept.secret))
        if mover.state in (MoverState.ENDING, MoverState.REAPED) and self._current.get(kept.client_id) is kept:
            del self._current[kept.client_id]
            self._ending.append(kept)
        if mover.state is MoverState.REAPED:
            events.reaped.append((kept.client_id, mover.reason))
