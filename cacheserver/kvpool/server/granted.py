# SPDX-License-Identifier: Apache-2.0
"""What was granted to movers, and for which store or load. Thread: the loop's.

A grant ends when its mover says that no copy of it runs, or when the mover is reaped; until then its slots stay held. A
mover that has moved all of it says so by itself: its word then waits for the commit, or the commit was there before.
"""

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.engine.claims import MoverClaims
from kvpool.metrics.catalogue import series_key
from kvpool.metrics.numbers import Numbers
from kvpool.model.checksum import PREFERRED
from kvpool.model.slots import CHECK, Disposition, SlotArray
from kvpool.server.movers import Movers
from kvpool.transfer.mover.messages import Direction, Revoked

__all__ = ["NO_CHECKS", "Granted", "Lease", "Over", "Rows", "sampled"]

_NAME_BYTES: Final = 8
_BYTES: Final = {d: series_key("kvpool_ring_bytes_total", direction=d.value) for d in Direction}
_CHECKS: Final = {d: series_key("kvpool_ring_checksums_total", direction=d.value) for d in Direction}
NO_CHECKS: Final = np.empty(0, dtype=CHECK)
_WHICH: Final = {Direction.STORE: int(Disposition.WRITE), Direction.LOAD: int(Disposition.IN_PLACE)}

_SPARED: Final = 12
"""While one core makes the checksum of a chunk beside copies, the link moves about so many. The last ones of a store
have none where there are others, so that its end does not wait for a checksum."""

Rows = NDArray[np.void]
Lease = tuple[bytes, ...]
"""Names a store (client and store id) or one reader's load (client and lookup id, and which part of it)."""

Over = Callable[[Revoked | None, int], None]
"""Called once nothing runs under a grant any more: what the mover said of it (None if it died), bytes of one chunk."""


@dataclass(slots=True, eq=False)
class _Grant:
    """Chunks that a mover may touch."""

    mover_id: bytes
    direction: Direction
    lease: Lease
    held: SlotArray
    """Slots with a pin of the mover's."""

    slots: SlotArray
    """Of all chunks, by row of the grant."""

    chunk_bytes: int
    revoked: bool = False
    overs: list[Over] = field(default_factory=list)
    """Who waits for its end, in order."""
    moved: Over | None = None
    """Who waits until all of it was moved."""

    def give_up(self) -> None:
        """Tell who waits until all of it was moved that this will not be known."""
        over, self.moved = self.moved, None
        if over is not None:
            over(None, self.chunk_bytes)


def sampled(chunks: int, count: int, within: float) -> NDArray[np.int64]:
    """Choose *count* of a store's *chunks*, evenly spread over all but the last few.

    Args:
        chunks: how many there are.
        count: how many of them.
        within: where in its stretch each one is: above 0, 1 for the end.
    """
    span = max(1, chunks - _SPARED)
    if count > span:
        return np.arange(count, dtype=np.int64)
    ends = (np.arange(count) + within) * (span / max(1, count))
    places: NDArray[np.int64] = np.ceil(ends.round(6)).astype(np.int64) - 1
    return places


class _Told(NamedTuple):
    """What a mover said by itself of all that was granted."""

    way: Direction
    end: Revoked
    chunk_bytes: int


class Granted:
    """All grants of all movers."""

    def __init__(self, movers: Movers, claims: MoverClaims, numbers: Numbers, checksums: float = 0.0) -> None:
        """Grant nothing yet; *checksums*: share of stored chunks whose checksum the mover makes."""
        self._movers, self._claims, self._numbers = movers, claims, numbers
        self._checksums, self._credit = checksums, 0.0
        self._grants: dict[bytes, _Grant] = {}
        self._open: dict[Lease, bytes] = {}
        """The last grant of each lease, until nothing runs under it any more."""
        self._told: dict[Lease, _Told] = {}
        """What movers said of stores and loads that are not committed yet."""
        self.moved: Counter[tuple[bytes, Direction]] = Counter()
        """Bytes by mover and direction, of grants that ended."""

    def grant(
        self,
        mover_id: bytes,
        way: Direction,
        lease: Lease,
        rows: Rows,
        now_s: float,
        checks: Rows = NO_CHECKS,
    ) -> bytes:
        """Let a mover move those chunks of a store that are to be written, or those of a load that lie in place.

        Args:
            mover_id: the mover.
            way: store or load.
            lease: what it is for.
            rows: ``PLACEMENT`` of all its chunks.
            now_s: monotonic.
            checks: loads: ``CHECK`` of all chunks, kind 0 where nothing is verified; or none at all.

        Returns:
            What the client names; empty if there is nothing to move.

        Raises:
            OSError: the arena's memory cannot be handed out.
        """
        chosen = rows["disposition"] == _WHICH[way]
        if not chosen.any():
            return b""
        self.revoke(lease, None, now_s)  # a load that is prepared again
        self._forget(lease)
        granted = rows.copy()
        granted["disposition"][~chosen] = 0
        name = secrets.token_bytes(_NAME_BYTES)
        if way is Direction.STORE:
            checks = self._to_make(chosen)
        self._movers.grant(mover_id, name, way, granted, checks.tobytes() if checks["kind"].any() else b"")
        held = rows["slot"][chosen] if way is Direction.LOAD else rows["slot"][:0]
        self._claims.hold(held)
        self._grants[name] = _Grant(mover_id, way, lease, held, rows["slot"], int(rows["length"][chosen][0]))
        self._open[lease] = name
        return name

    def revoke(self, lease: Lease, over: Over | None, now_s: float) -> bool:
        """End a lease's grant, and call *over* once nothing runs under it, also at once; False if there was none.

        It may have been revoked before: until the mover says that it is over, whoever comes later waits as well.
        """
        told = self._told.get(lease)
        if told is not None and (over is not None or told.way is Direction.LOAD):
            del self._told[lease]
            if over is not None:
                over(told.end, told.chunk_bytes)
            return True
        name = self._open.get(lease, b"")
        if not name:
            return False
        grant = self._grants[name]
        grant.overs += [over] if over is not None else []
        grant.give_up()
        if not grant.revoked:
            grant.revoked = True
            self._movers.revoke(grant.mover_id, name, now_s)
        return True

    def await_moved(self, lease: Lease, over: Over) -> bool:
        """Call *over* once a mover has moved all of a lease's grant, also at once; False if none is at it.

        Without the mover's word if something else ends the grant before.
        """
        if (told := self._told.pop(lease, None)) is not None:
            over(told.end, told.chunk_bytes)
            return True
        grant = self._grants.get(self._open.get(lease, b""))
        if grant is None or grant.revoked or grant.moved is not None:
            return False
        grant.moved = over
        return True

    def ended(self, name: bytes, end: Revoked | None) -> None:
        """Learn that nothing runs under a grant any more; *end* is what the mover said, None if it died."""
        grant = self._grants.pop(name, None)
        if grant is None:
            return
        if self._open.get(grant.lease) == name:
            del self._open[grant.lease]
        if end is not None:
            self._note(grant, end)
        self._claims.let_go(grant.held)
        if end is None:
            grant.give_up()
        overs = [over for over in (*grant.overs, grant.moved) if over is not None]
        for over in overs:
            over(end, grant.chunk_bytes)
        if overs:
            return
        if end is not None and self._lives(grant.lease, grant.direction):
            self._told[grant.lease] = _Told(grant.direction, end, grant.chunk_bytes)
        elif grant.direction is Direction.STORE:
            self._claims.store_over(*grant.lease)

    def mover_reaped(self, mover_id: bytes) -> None:
        """Learn that a mover does not exist any more: all its grants end."""
        self._claims.reaped(mover_id)
        for name in [n for n, g in self._grants.items() if g.mover_id == mover_id]:
            self.ended(name, None)
        for direction in Direction:
            self.moved.pop((mover_id, direction), None)

    def keep_house(self, now_s: float) -> bool:
        """End the grants of leases that ran out; returns whether there were any."""
        unrevoked = [g for g in map(self._grants.__getitem__, self._open.values()) if not g.revoked]
        over = [grant.lease for grant in unrevoked if not self._lives(grant.lease, grant.direction)]
        for lease in over:
            self.revoke(lease, None, now_s)
        for lease in [lease for lease, told in self._told.items() if not self._lives(lease, told.way)]:
            self._forget(lease)
        return bool(over)

    def _forget(self, lease: Lease) -> None:
        """Drop what a mover said of a store or load that ended without a commit."""
        told = self._told.pop(lease, None)
        if told is not None and told.way is Direction.STORE:
            self._claims.store_over(*lease)

    def _note(self, grant: _Grant, end: Revoked) -> None:
        """Count what was moved, and drop what was found to be damaged."""
        checked = end.verified + len(end.wrong)
        if grant.direction is Direction.STORE:
            checked = int(np.count_nonzero(np.frombuffer(end.checks, dtype=CHECK)["kind"]))
        self._numbers.add(_BYTES[grant.direction], end.moved_bytes)
        self.moved[grant.mover_id, grant.direction] += end.moved_bytes
        self._numbers.add(_CHECKS[grant.direction], checked)
        if end.wrong:
            self._claims.damaged(grant.slots[list(end.wrong)])

    def _to_make(self, chosen: NDArray[np.bool_]) -> Rows:
        """Return the checksums that are to be made of some chunks: a share of them, evenly spread over all stores."""
        rows = np.flatnonzero(chosen)
        before, self._credit = self._credit, self._credit + self._checksums * len(rows)
        count = int(self._credit)
        self._credit -= count
        # Where in the store the first one would be if the last chunks were not spared: anywhere, from store to store.
        within = count * (1 - before) / (self._credit + count - before) if count else 1.0
        checks = np.zeros(len(chosen), dtype=CHECK)
        checks["kind"][rows[sampled(len(rows), count, within)]] = int(PREFERRED)
        return checks

    def _lives(self, lease: Lease, way: Direction) -> bool:
        if way is Direction.STORE:
            return self._claims.store_lives(*lease)
        return self._claims.lookup_lives(lease[1])
