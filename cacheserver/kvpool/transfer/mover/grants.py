# SPDX-License-Identifier: Apache-2.0
"""What the client may have moved, and which of it is being moved now."""

import threading
from collections import deque
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.model.slots import PLACEMENT
from kvpool.transfer.mover.messages import Direction, Grant, Move

__all__ = ["Copies", "Grants", "NotGrantedError"]

_COMING_S: Final = 2.0
"""A grant and the first move under it come by different ways; the move may be first."""

_REMEMBERED: Final = 256
"""Revoked grants that a late move may still name."""


class NotGrantedError(LookupError):
    """The server does not let the client move this, not any more or not yet."""


Copies = list[tuple[int, int, int, int]]
"""Memory, offset in it, offset in the slot, length."""


@dataclass(slots=True)
class _Held:
    grant: Grant
    rows: NDArray[np.void]
    running: int = 0
    moved_bytes: int = 0
    revoked: bool = field(default=False)


class Grants:
    """All grants of one mover. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[bytes, _Held] = {}
        self._over: deque[bytes] = deque(maxlen=_REMEMBERED)

    def add(self, grant: Grant) -> None:
        """Learn a grant."""
        held = _Held(grant, np.frombuffer(grant.rows, dtype=PLACEMENT))
        with self._changed:
            self._held[grant.grant] = held
            self._changed.notify_all()

    def revoke(self, grant: bytes) -> int | None:
        """End a grant; returns the bytes moved under it once nothing runs, None while something does (see ``end``)."""
        with self._changed:
            held = self._held.get(grant)
            self._over.append(grant)
            if held is None:
                return 0
            held.revoked = True
            if held.running:
                return None
            del self._held[grant]
            return held.moved_bytes

    def begin(self, move: Move, direction: Direction, slot_bytes: int) -> Copies:
        """Return the copies of a move and hold its grant until ``end``; adjacent ones are merged.

        Raises:
            NotGrantedError: it is not granted, or not like this.
        """
        ends_s = monotonic() + _COMING_S
        with self._changed:
            while (held := self._held.get(move.grant)) is None:
                if move.grant in self._over or not self._changed.wait(ends_s - monotonic()):
                    raise NotGrantedError("no such grant")
            if held.revoked or held.grant.direction is not direction:
                raise NotGrantedError("the grant is revoked or for the other direction")
            copies = _copies(held.rows, move, slot_bytes)
            held.running += 1
            return copies

    def end(self, grant: bytes, moved_bytes: int) -> int | None:
        """End a move; returns the bytes of the grant if it was the last one of a revoked grant."""
        with self._changed:
            held = self._held[grant]
            held.running -= 1
            held.moved_bytes += moved_bytes
            if not held.revoked or held.running:
                return None
            del self._held[grant]
            return held.moved_bytes


def _copies(rows: NDArray[np.void], move: Move, slot_bytes: int) -> Copies:
    """Make the copies of a move. A slot has few chunks: plain numbers are quicker here than arrays."""
    length = move.length
    if not move.chunks or max(move.chunks) >= len(rows) or len(move.chunks) * length > slot_bytes:
        raise NotGrantedError("chunks or bytes that the grant or the slot does not have")
    copies: Copies = []
    for number, chunk in enumerate(move.chunks):
        _, memory, granted, offset, whole = rows[chunk].item()
        if not granted or move.offset + length > whole:
            raise NotGrantedError("a chunk is not granted, or not as long")
        begin = offset + move.offset
        if copies and (last := copies[-1])[0] == memory and last[1] + last[3] == begin:
            copies[-1] = (memory, last[1], last[2], last[3] + length)
        else:
            copies.append((memory, begin, number * length, length))
    return copies
