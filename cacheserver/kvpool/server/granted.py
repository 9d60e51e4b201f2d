# SPDX-License-Identifier: Apache-2.0
"""What was granted to movers, and for which store or load. Thread: the loop's.

A grant ends when its mover says that no copy of it runs, or when the mover is reaped; until then its slots stay held.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.engine.claims import MoverClaims
from kvpool.metrics.catalogue import series_key
from kvpool.metrics.numbers import Numbers
from kvpool.model.slots import Disposition, SlotArray
from kvpool.server.movers import Movers
from kvpool.transfer.mover.messages import Direction

__all__ = ["Granted", "Lease", "Over"]

_NAME_BYTES: Final = 8
_BYTES: Final = {d: series_key("kvpool_ring_bytes_total", direction=d.value) for d in Direction}
_WHICH: Final = {Direction.STORE: int(Disposition.WRITE), Direction.LOAD: int(Disposition.IN_PLACE)}

Lease = tuple[bytes, ...]
"""Names a store (client and store id) or one reader's load (client and lookup id, and which part of it)."""

Over = Callable[[int | None, int], None]
"""Called once nothing runs under a grant any more: bytes that were moved under it (None if nobody knows, because the
mover died), bytes of one chunk."""


@dataclass(slots=True, eq=False)
class _Grant:
    """Chunks that a mover may touch."""

    mover_id: bytes
    direction: Direction
    lease: Lease
    held: SlotArray
    """Slots with a pin of the mover's."""

    chunk_bytes: int
    over: Over | None = None


class Granted:
    """All grants of all movers."""

    def __init__(self, movers: Movers, claims: MoverClaims, numbers: Numbers) -> None:
        self._movers, self._claims, self._numbers = movers, claims, numbers
        self._grants: dict[bytes, _Grant] = {}
        self._open: dict[Lease, bytes] = {}
        """Leases with a grant that is not revoked."""

    def grant(self, mover_id: bytes, way: Direction, lease: Lease, rows: NDArray[np.void], now_s: float) -> bytes:
        """Let a mover move those chunks of a store that are to be written, or those of a load that lie in place.

        Returns:
            What the client names; empty if there is nothing to move.

        Raises:
            OSError: the arena's memory cannot be handed out.
        """
        chosen = rows["disposition"] == _WHICH[way]
        if not chosen.any():
            return b""
        self.revoke(lease, None, now_s)  # a load that is prepared again
        granted = rows.copy()
        granted["disposition"][~chosen] = 0
        name = secrets.token_bytes(_NAME_BYTES)
        self._movers.grant(mover_id, name, way, granted)
        held = rows["slot"][chosen] if way is Direction.LOAD else rows["slot"][:0]
        self._claims.hold(held)
        self._grants[name] = _Grant(mover_id, way, lease, held, int(rows["length"][chosen][0]))
        self._open[lease] = name
        return name

    def revoke(self, lease: Lease, over: Over | None, now_s: float) -> bool:
        """End a lease's grant, and call *over* once nothing runs under it; False if it has none."""
        name = self._open.pop(lease, b"")
        if not name:
            return False
        self._grants[name].over = over
        self._movers.revoke(self._grants[name].mover_id, name, now_s)
        return True

    def ended(self, name: bytes, moved: int | None) -> None:
        """Learn that nothing runs under a grant any more."""
        grant = self._grants.pop(name, None)
        if grant is None:
            return
        if self._open.get(grant.lease) == name:
            del self._open[grant.lease]
        self._numbers.add(_BYTES[grant.direction], moved or 0)
        self._claims.let_go(grant.held)
        if grant.over is not None:
            grant.over(moved, grant.chunk_bytes)
        elif grant.direction is Direction.STORE:
            self._claims.store_over(*grant.lease)

    def mover_reaped(self, mover_id: bytes) -> None:
        """Learn that a mover does not exist any more: all its grants end."""
        self._claims.reaped(mover_id)
        for name in [n for n, g in self._grants.items() if g.mover_id == mover_id]:
            self.ended(name, None)

    def keep_house(self, now_s: float) -> bool:
        """End the grants of leases that ran out; returns whether there were any."""
        over = [lease for lease, name in self._open.items() if not self._lives(lease, self._grants[name].direction)]
        for lease in over:
            self.revoke(lease, None, now_s)
        return bool(over)

    def _lives(self, lease: Lease, way: Direction) -> bool:
        if way is Direction.STORE:
            return self._claims.store_lives(*lease)
        return self._claims.lookup_lives(lease[1])
