# SPDX-License-Identifier: Apache-2.0
"""What the client may have moved, which of it is being moved now, and the checksums of what was."""

import threading
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.model.checksum import ChecksumKind
from kvpool.model.slots import CHECK, PLACEMENT
from kvpool.transfer.mover.messages import Direction, Grant, Move, Revoked

__all__ = ["Copies", "Grants", "NotGrantedError", "Place"]

_COMING_S: Final = 2.0
"""A grant and the first move under it come by different ways; the move may be first."""

_REMEMBERED: Final = 256
"""Grants that ended, which a late move or Revoke may still name."""


class NotGrantedError(LookupError):
    """The server does not let the client move this, not any more or not yet."""


Copies = list[tuple[int, int, int, int]]
"""Memory, offset in it, offset in the slot, length."""

Place = tuple[int, int, int]
"""Memory, offset in it and length of a whole chunk."""


@dataclass(slots=True)
class _Held:
    grant: Grant
    rows: NDArray[np.void]
    checks: NDArray[np.void]
    """To be made or verified; stores: made ones are filled in, and ``made`` says which."""

    running: int = 0
    moved_bytes: int = 0
    revoked: bool = False
    """Also true once all that was granted came: nobody has to say so."""

    missing_bytes: int = 0
    """Of what was granted."""

    came: set[tuple[int, int]] = field(default_factory=set)
    """Chunk, and where a part of it begins that came."""

    filled: dict[int, int] = field(default_factory=dict)
    """Stores: bytes that came, by chunk whose checksum is to be made."""

    made: set[int] = field(default_factory=set)
    verdicts: dict[int, bool] = field(default_factory=dict)
    """Loads: whether a chunk had its checksum."""

    def kind(self, chunk: int) -> ChecksumKind:
        return ChecksumKind(int(self.checks["kind"][chunk])) if len(self.checks) else ChecksumKind.NONE

    def note(self, move: Move) -> None:
        """Note what a move brought; a part that comes again is none that was missing."""
        parts = {(chunk, move.offset) for chunk in move.chunks} - self.came
        self.came |= parts
        self.missing_bytes -= len(parts) * move.length
        self.revoked |= self.missing_bytes <= 0

    def end(self) -> Revoked:
        """Return what the server is told."""
        checks = self.checks.copy()
        if self.grant.direction is Direction.STORE and len(checks):
            checks[[n for n in range(len(checks)) if n not in self.made]] = np.zeros((), dtype=CHECK)
        else:
            checks = checks[:0]
        return Revoked(
            grant=self.grant.grant,
            moved_bytes=self.moved_bytes,
            checks=checks.tobytes(),
            verified=sum(self.verdicts.values()),
            wrong=tuple(chunk for chunk, good in self.verdicts.items() if not good),
        )


class Grants:
    """All grants of one mover. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[bytes, _Held] = {}
        self._over: dict[bytes, Revoked] = {}
        """Ends, the last one at the end."""

    def add(self, grant: Grant) -> None:
        """Learn a grant."""
        rows = np.frombuffer(grant.rows, dtype=PLACEMENT)
        held = _Held(grant, rows, np.frombuffer(grant.checks, dtype=CHECK).copy())
        held.missing_bytes = int(rows["length"][rows["disposition"] != 0].sum())
        with self._changed:
            self._held[grant.grant] = held
            self._changed.notify_all()

    def revoke(self, grant: bytes) -> Revoked | None:
        """End a grant; returns its end if nothing runs, also if it ended before; else see ``end``."""
        with self._changed:
            held = self._held.get(grant)
            if held is None:
                return self._remember(self._over.get(grant) or Revoked(grant=grant))
            held.revoked = True
            return self._ended(held)

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

    def end(self, grant: bytes, moved_bytes: int = 0) -> Revoked | None:
        """End a move, or a checksum's making; returns the grant's end if it was the last one of a grant.

        That is one that was revoked, or under which all that was granted came.
        """
        with self._changed:
            held = self._held[grant]
            held.running -= 1
            held.moved_bytes += moved_bytes
            return self._ended(held)

    def came(self, move: Move) -> None:
        """Note what a load's move brought, before its ``end``."""
        with self._changed:
            self._held[move.grant].note(move)

    # Checksums of what was moved. All of this between ``begin`` and ``end`` of some move.

    def arrived(self, move: Move) -> list[tuple[int, Place]]:
        """Note what a store's move brought; returns the chunks whose checksum is to be made now.

        Each of them holds the grant until an ``end`` of its own.
        """
        whole: list[tuple[int, Place]] = []
        with self._changed:
            held = self._held[move.grant]
            held.note(move)
            for chunk in move.chunks:
                if held.kind(chunk):
                    held.filled[chunk] = held.filled.get(chunk, 0) + move.length
                    place = _place(held.rows, chunk)
                    # A part that comes again is what counts from then on.
                    if held.filled[chunk] >= place[2]:
                        held.running += 1
                        whole.append((chunk, place))
        return whole

    def kind(self, grant: bytes, chunk: int) -> ChecksumKind:
        """Return the kind of a chunk's checksum."""
        with self._changed:
            return self._held[grant].kind(chunk)

    def made(self, grant: bytes, chunk: int, checksum: bytes) -> None:
        """Note the checksum of a chunk that was stored."""
        with self._changed:
            held = self._held[grant]
            held.checks["checksum"][chunk] = np.void(checksum)
            held.made.add(chunk)

    def unverified(self, move: Move) -> list[tuple[int, Place, bytes]]:
        """Return the chunks of a load's move that nobody has verified yet, and the checksum that each must have."""
        with self._changed:
            held = self._held[move.grant]
            return [
                (chunk, _place(held.rows, chunk), held.checks["checksum"][chunk].tobytes())
                for chunk in move.chunks
                if held.kind(chunk) and chunk not in held.verdicts
            ]

    def judge(self, grant: bytes, chunk: int, *, good: bool) -> None:
        """Note whether a chunk had its checksum."""
        with self._changed:
            self._held[grant].verdicts[chunk] = good

    def wrong(self, move: Move) -> tuple[int, ...]:
        """Return the chunks of a move that did not have their checksum."""
        with self._changed:
            verdicts = self._held[move.grant].verdicts
            return tuple(chunk for chunk in move.chunks if not verdicts.get(chunk, True))

    def _ended(self, held: _Held) -> Revoked | None:
        if not held.revoked or held.running:
            return None
        del self._held[held.grant.grant]
        return self._remember(held.end())

    def _remember(self, end: Revoked) -> Revoked:
        """Keep an end for a while: a Revoke that crosses it is answered with the same."""
        self._over[end.grant] = end
        while len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]
        return end


def _place(rows: NDArray[np.void], chunk: int) -> Place:
    _, memory, _, offset, length = rows[chunk].item()
    return memory, offset, length


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
