# SPDX-License-Identifier: Apache-2.0
"""Retrieves: where the chunks of a lookup lie, pieces of streamed ones, and whether what was read may be used."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvpool.engine.clients import Client
from kvpool.engine.core import Core
from kvpool.engine.counters import CHECKSUM_MISMATCHES, LOADED, LOADED_BYTES
from kvpool.engine.lookup import Lookups
from kvpool.engine.outcomes import ReadPlan
from kvpool.engine.pinning import release_share
from kvpool.index.leases import Holding, LookupLease
from kvpool.index.phases import READY
from kvpool.model.checksum import CHECKSUM_BYTES
from kvpool.model.errors import InvalidRange, LimitExceeded, Malformed, UnknownLease
from kvpool.model.identity import Mode
from kvpool.model.slots import PLACEMENT, SERVER_OWNED, Disposition, SlotArray

__all__ = ["Piece", "Retrieves"]

# Plain numbers for NumPy, see phases.
_IN_PLACE, _STREAM = int(Disposition.IN_PLACE), int(Disposition.STREAM)
_VOUCHED, _LOST = int(Disposition.VOUCHED), int(Disposition.LOST)

Piece = tuple[bytes, int, int, int]
"""(lookup id, group, shard, chunk) of a copy that runs."""


class Retrieves:
    """The verbs prepare_retrieve, begin_read, end_read and commit_retrieve."""

    def __init__(self, core: Core, lookups: Lookups) -> None:
        """Work on *core*, for leases of *lookups*."""
        self._core = core
        self._lookups = lookups
        self._reads: dict[Piece, list[int]] = {}
        """Slots of running copies; each has a pin of its own, which outlives the lookup's."""
        self._verify_credit = 0.0

    def prepare(
        self, client: Client, lookup_id: bytes, place: tuple[int, int], first: int, end: int, now_s: float
    ) -> ReadPlan:
        """Say where chunks [first, end) lie; *place* is (group, shard)."""
        registration = client.loader()
        lease = self._lookups.live(client, lookup_id)
        holding = self._holding(lease, place, first, end)
        self._core.lookups.renew(lookup_id, now_s + self._core.config.leases.lookup_s)
        held = self._readable(holding, first, end)
        slots = holding.slots[first:end][held]
        plan = ReadPlan(
            np.zeros(end - first, dtype=PLACEMENT),
            np.zeros(end - first, dtype=f"V{CHECKSUM_BYTES}"),
            np.zeros(end - first, dtype=np.uint8),
        )
        plan.placements["disposition"] = _LOST
        plan.placements["length"] = lease.scope.groups[place[0]].shard_bytes
        self._fill(plan, held, slots, self._in_place(client, registration.mode, slots))
        return plan

    def _in_place(self, client: Client, mode: Mode, slots: SlotArray) -> NDArray[np.bool_]:
        """Return which slots the client, or its mover, may read where they are."""
        if client.mover:
            return self._core.index.owned_by(slots, SERVER_OWNED)
        if mode is Mode.CLIENT_MOVED:
            return self._core.index.owned_by(slots, client.tenant)
        return np.zeros(len(slots), dtype=np.bool_)

    def _fill(self, plan: ReadPlan, held: NDArray[np.bool_], slots: SlotArray, owned: NDArray[np.bool_]) -> None:
        at = np.flatnonzero(held)
        rows = plan.placements
        rows["slot"] = -1
        rows["slot"][at] = slots
        rows["memory"][at] = self._core.arena.memories(slots // self._core.arena.stride)
        rows["offset"][at] = self._core.arena.offsets(slots)
        rows["disposition"][at] = np.where(owned, _IN_PLACE, _STREAM)
        verify = self._core.index.slots.unverified[slots] | self._sampled()
        if verify.any():  # headers are large, and most loads need none
            headers = self._core.arena.rows(slots)
            plan.checksums[at] = headers["checksum"]
            plan.kinds[at] = np.where(verify, headers["checksum_kind"], 0)

    def begin_read(self, client: Client, piece: Piece, offset: int, length: int) -> Callable[[], bytes]:
        """Return what copies one piece, on any thread; the copy holds the slot until ``end_read``."""
        client.loader()
        lookup_id, group, shard, chunk = piece
        lease = self._lookups.live(client, lookup_id)
        holding = self._holding(lease, (group, shard), chunk, chunk + 1)
        size = lease.scope.groups[group].shard_bytes
        if offset < 0 or length < 1 or offset + length > size:
            raise InvalidRange(f"bytes [{offset}, {offset + length}) of a piece of {size}")
        if not self._readable(holding, chunk, chunk + 1)[0]:
            raise UnknownLease(f"the lookup holds chunk {chunk} no more")
        slots = holding.slots[chunk : chunk + 1]
        self._core.index.pin(slots, 1)
        self._reads.setdefault(piece, []).append(int(slots[0]))
        return partial(self._core.arena.read, int(slots[0]), offset, length)

    def end_read(self, piece: Piece) -> None:
        """End the copy of one piece, whatever became of its lookup meanwhile."""
        slots = self._reads.get(piece)
        if not slots:
            raise UnknownLease("no copy of this lookup and chunk is running")
        slot = slots.pop()
        if not slots:
            del self._reads[piece]
        self._core.index.unpin(np.array([slot]), 1)

    def commit(
        self, client: Client, lookup_id: bytes, place: tuple[int, int], first: int, end: int, bad: NDArray[np.bool_]
    ) -> NDArray[np.uint8]:
        """Release one reader's share of chunks [first, end) and vouch for what was the chunks' all along."""
        client.loader()
        if not 0 <= first < end or end - first > self._core.config.limits.chunks:
            raise LimitExceeded(f"chunks [{first}, {end}) in one request")
        if len(bad) != end - first:
            raise Malformed(f"{len(bad)} marks for {end - first} chunks")
        answer = np.full(end - first, _LOST, dtype=np.uint8)
        try:
            lease = self._lookups.live(client, lookup_id)
        except UnknownLease:
            return self._count(answer, 0)  # it ran out: nobody vouches for what was read
        holding = self._holding(lease, place, first, end)
        readable = self._readable(holding, first, end)
        answer[readable & ~bad] = _VOUCHED
        self._finish(lease, holding, first, readable, bad)
        return self._count(answer, lease.scope.groups[place[0]].shard_bytes)

    def _finish(
        self,
        lease: LookupLease,
        holding: Holding,
        first: int,
        readable: NDArray[np.bool_],
        bad: NDArray[np.bool_],
    ) -> None:
        good = np.flatnonzero(readable & ~bad) + first
        if len(good):
            self._core.index.slots.unverified[holding.slots[good]] = False
            self._core.index.used(holding.slots[good], good.astype(np.uint32))
        corrupt = holding.slots[np.flatnonzero(readable & bad) + first]
        if len(corrupt):
            self._core.drop(corrupt)
            self._core.counters.add(CHECKSUM_MISMATCHES, len(corrupt))
        shares = holding.shares[first : first + len(bad)]
        release_share(self._core, lease, holding, np.flatnonzero(shares) + first)
        if not lease.unread():
            self._lookups.end(lease.lookup_id)

    def _holding(self, lease: LookupLease, place: tuple[int, int], first: int, end: int) -> Holding:
        holding = lease.holdings.get(place)
        if holding is None:
            raise InvalidRange(f"the lookup did not ask for group {place[0]}, shard {place[1]}")
        if not 0 <= first < end <= lease.chunks:
            raise InvalidRange(f"chunks [{first}, {end}) of a lookup that found {lease.chunks}")
        return holding

    def _readable(self, holding: Holding, first: int, end: int) -> NDArray[np.bool_]:
        """Return which chunks are pinned by the lookup, and in the index still."""
        ready = self._core.index.slots.phase[holding.slots[first:end]] == READY
        readable: NDArray[np.bool_] = (holding.shares[first:end] > 0) & ready
        return readable

    def _sampled(self) -> bool:
        """True for as many loads as are to be verified, evenly spread."""
        self._verify_credit += self._core.config.l1.verify_loads
        sampled = self._verify_credit >= 1
        self._verify_credit -= sampled
        return sampled

    def _count(self, answer: NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
        vouched = int(np.count_nonzero(answer == _VOUCHED))
        self._core.counters.add(LOADED[Disposition.VOUCHED], vouched)
        self._core.counters.add(LOADED[Disposition.LOST], len(answer) - vouched)
        self._core.counters.add(LOADED_BYTES, vouched * length)
        return answer
