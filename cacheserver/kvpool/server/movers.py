# SPDX-License-Identifier: Apache-2.0
"""All movers, by ids that are never used again. Owned by the loop's thread, like everything it tells.

What a mover may still write to is held until its Revoked, or until it is reaped: ``turn`` returns both.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.mover.messages import Direction, Revoked, Ring, Start
from kvpool.transfer.mover.supervision import MOVER_COMMAND, Mover, MoverLimits, MoverState

__all__ = ["MoverEvents", "Movers"]

_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class MoverEvents:
    """What happened since the last turn."""

    ready: list[tuple[bytes, str, bytes]] = field(default_factory=list)
    """Mover, address and secret: its client may join now."""

    revoked: list[tuple[bytes, Revoked]] = field(default_factory=list)
    """Mover, and a grant with what was moved under it: no copy of it runs any more."""

    reaped: list[tuple[bytes, str]] = field(default_factory=list)
    """Mover and reason: it writes nothing any more, whatever was granted to it."""


@dataclass(slots=True)
class _Kept:
    mover_id: bytes
    mover: Mover
    secret: bytes
    given: set[int] = field(default_factory=set)
    announced: bool = False


class Movers:
    """Starts, feeds and ends movers. No call waits."""

    def __init__(
        self,
        descriptor: Callable[[int], tuple[int, int]],
        command: Sequence[str] = MOVER_COMMAND,
        limits: MoverLimits | None = None,
    ) -> None:
        """Keep no mover yet.

        Args:
            descriptor: memory number to a new writable descriptor of that memory and its length.
            command: the movers' program.
            limits: after these one is killed.
        """
        self._descriptor, self._command, self._limits = descriptor, command, limits
        self._current: dict[bytes, _Kept] = {}
        self._ending: list[_Kept] = []

    def start(self, mover_id: bytes, ring: Ring, client_pid: int, listen: str, now_s: float) -> None:
        """Start a mover.

        Raises:
            OSError: no process can be had.
        """
        secret = secrets.token_bytes(_SECRET_BYTES)
        start = Start(ring=ring, secret=secret, listen=listen)
        mover = Mover(self._command, start, client_pid, now_s, self._limits)
        self._current[mover_id] = _Kept(mover_id, mover, secret)

    def give(self, mover_id: bytes, memories: Iterable[int]) -> bool:
        """Hand a mover memory that it does not have; it registers it in the background. Returns whether there was any.

        What cannot be handed out now (out of descriptors) is left for later.
        """
        kept = self._current.get(mover_id)
        if kept is None:
            return False
        missing = sorted(set(memories) - kept.given)
        with suppress(OSError):
            for memory in missing:
                self._give(kept, memory)
        return bool(missing)

    def grant(
        self, mover_id: bytes, grant: bytes, direction: Direction, rows: NDArray[np.void], checks: bytes = b""
    ) -> bool:
        """Let a mover move chunks (``PLACEMENT`` rows; disposition 0: not this one); False if it ends.

        Memory that the mover does not know yet is handed to it first. *checks*: see ``messages.Grant``.

        Raises:
            OSError: out of descriptors.
        """
        kept = self._current.get(mover_id)
        if kept is None:
            return False
        for memory in np.unique(rows["memory"][rows["disposition"] != 0]).tolist():
            if memory not in kept.given:
                self._give(kept, memory)
        kept.mover.grant(grant, direction, rows, checks)
        return True

    def revoke(self, mover_id: bytes, grant: bytes, now_s: float) -> bool:
        """End a grant; its end comes out of ``turn``, in which a mover that ends is reaped. False if it ends."""
        kept = self._current.get(mover_id)
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

    def end(self, mover_id: bytes, reason: str) -> None:
        """Kill a mover; it is gone when ``turn`` says so. Idempotent."""
        kept = self._current.pop(mover_id, None)
        if kept is not None:
            kept.mover.kill(reason)
            self._ending.append(kept)

    def end_all(self, reason: str) -> None:
        """Kill every mover."""
        for mover_id in list(self._current):
            self.end(mover_id, reason)

    def turn(self, now_s: float) -> MoverEvents:
        """Send, receive, look at deadlines and reap, for all movers."""
        events = MoverEvents()
        for kept in list(self._all()):
            events.revoked.extend((kept.mover_id, ended) for ended in kept.mover.turn(now_s))
            self._note(kept, events)
        self._ending = [kept for kept in self._ending if kept.mover.state is not MoverState.REAPED]
        return events

    def memories(self) -> set[int]:
        """Return the memory that some mover has."""
        return set().union(*(kept.given for kept in self._current.values()))

    def pid(self, mover_id: bytes) -> int | None:
        """Return a mover's process id; None once it is reaped, or before it is started."""
        return next((kept.mover.pid for kept in self._all() if kept.mover_id == mover_id), None)

    def current(self) -> frozenset[bytes]:
        """Return the movers that neither end nor ended."""
        return frozenset(self._current)

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

    def _give(self, kept: _Kept, memory: int) -> None:
        kept.mover.give_segment(memory, *self._descriptor(memory))
        kept.given.add(memory)

    def _all(self) -> Iterator[_Kept]:
        yield from self._current.values()
        yield from self._ending

    def _note(self, kept: _Kept, events: MoverEvents) -> None:
        mover = kept.mover
        if mover.state is MoverState.READY and not kept.announced:
            kept.announced = True
            events.ready.append((kept.mover_id, mover.address, kept.secret))
        if mover.state in (MoverState.ENDING, MoverState.REAPED) and self._current.get(kept.mover_id) is kept:
            del self._current[kept.mover_id]
            self._ending.append(kept)
        if mover.state is MoverState.REAPED:
            events.reaped.append((kept.mover_id, mover.reason))
