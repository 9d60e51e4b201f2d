# SPDX-License-Identifier: Apache-2.0
"""Movers without processes: a test says when each of them is ready, ends a grant, dies, is reaped.

The same face as ``kvpool.server.movers.Movers``. What a mover may still touch is what it was granted and has not given
back, until it is reaped, as with a real one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpool.server.movers import MoverEvents
from kvpool.transfer.mover.messages import Direction, Revoked, Ring


@dataclass(eq=False)
class Hand:
    """What a mover holds under one grant."""

    direction: Direction
    slots: NDArray[np.int64]
    memories: set[int]
    chunk_bytes: int
    asked: bool = False
    """True once it was told to end the grant."""


@dataclass(eq=False)
class ScriptedMover:
    mover_id: bytes
    listen: str
    ready: bool = False
    grants: dict[bytes, Hand] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    reason: str = ""


class ScriptedMovers:
    """See the module."""

    def __init__(self) -> None:
        self.living: dict[bytes, ScriptedMover] = {}
        self.ending: list[ScriptedMover] = []
        self.refuse_start: OSError | None = None
        self.refuse_memory: OSError | None = None
        self._events = MoverEvents()
        self._said: dict[bytes, Revoked] = {}

    # --- what the server does --------------------------------------------------------------------------------------

    def start(self, mover_id: bytes, ring: Ring, client_pid: int, listen: str, now_s: float) -> None:
        del ring, client_pid, now_s
        if self.refuse_start is not None:
            raise self.refuse_start
        self.living[mover_id] = ScriptedMover(mover_id, listen)

    def give(self, mover_id: bytes, memories: Iterable[int]) -> bool:
        mover = self.living.get(mover_id)
        missing = set() if mover is None else set(memories) - mover.given
        if mover is not None:
            mover.given |= missing
        return bool(missing)

    def grant(
        self, mover_id: bytes, grant: bytes, direction: Direction, rows: NDArray[np.void], checks: bytes = b""
    ) -> bool:
        del checks
        mover = self.living.get(mover_id)
        if mover is None:
            return False
        if self.refuse_memory is not None:
            raise self.refuse_memory
        chosen = rows[rows["disposition"] != 0]
        memories = set(chosen["memory"].tolist())
        mover.given |= memories
        mover.grants[grant] = Hand(direction, chosen["slot"].copy(), memories, int(chosen["length"][0]))
        return True

    def revoke(self, mover_id: bytes, grant: bytes, now_s: float) -> bool:
        del now_s
        mover = self.living.get(mover_id)
        if mover is None:
            return False
        if grant in mover.grants:
            mover.grants[grant].asked = True
        else:  # its word and this crossed: it says the same again
            self._events.revoked.append((mover_id, self._said[grant]))
        return True

    def forget(self, memory: int) -> None:
        for mover in self.living.values():
            assert not any(memory in hand.memories for hand in mover.grants.values()), "it may still be written to"
            mover.given.discard(memory)

    def end(self, mover_id: bytes, reason: str) -> None:
        mover = self.living.pop(mover_id, None)
        if mover is not None:
            mover.reason = reason
            self.ending.append(mover)

    def end_all(self, reason: str) -> None:
        for mover_id in list(self.living):
            self.end(mover_id, reason)

    def turn(self, now_s: float) -> MoverEvents:
        del now_s
        events, self._events = self._events, MoverEvents()
        return events

    def memories(self) -> set[int]:
        return set().union(*(mover.given for mover in self.living.values()))

    def current(self) -> frozenset[bytes]:
        return frozenset(self.living)

    def pid(self, mover_id: bytes) -> int:
        del mover_id
        return 0

    def filenos(self) -> list[int]:
        return []

    def next_deadline_s(self) -> float | None:
        return None

    def __len__(self) -> int:
        return len(self.living) + len(self.ending)

    # --- what the test does ----------------------------------------------------------------------------------------

    def all(self) -> list[ScriptedMover]:
        return [*self.living.values(), *self.ending]

    def say_ready(self, mover: ScriptedMover) -> None:
        mover.ready = True
        self._events.ready.append((mover.mover_id, f"unix:/d/{mover.listen}", b"secret"))

    def say_revoked(self, mover: ScriptedMover, grant: bytes, moved_chunks: int | None = None) -> None:
        """Let it end a grant; by default it has moved all of it."""
        hand = mover.grants.pop(grant)
        chunks = len(hand.slots) if moved_chunks is None else moved_chunks
        self._said[grant] = Revoked(grant=grant, moved_bytes=chunks * hand.chunk_bytes)
        self._events.revoked.append((mover.mover_id, self._said[grant]))

    def die(self, mover: ScriptedMover, reason: str = "it ended by itself") -> None:
        """Let it end by itself; it is not reaped yet."""
        self.end(mover.mover_id, reason)

    def reap(self, mover: ScriptedMover) -> None:
        self.ending.remove(mover)
        mover.grants.clear()
        self._events.reaped.append((mover.mover_id, mover.reason))
