# SPDX-License-Identifier: Apache-2.0
"""The index: which chunk lies in which slot, who holds it, and where the next one goes."""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvpool.index.evict import Evictor
from kvpool.index.journal import Journal
from kvpool.index.phases import LAPSED, WRITING, Op
from kvpool.index.policy.port import Policy
from kvpool.index.quotas import EVERYBODY
from kvpool.index.regions import Region, Regions, SlotClass
from kvpool.index.shares import Shares
from kvpool.index.slots import SlotTable
from kvpool.index.tables import KeyTable, Scopes
from kvpool.model.errors import PoolFull
from kvpool.model.slots import SERVER_OWNED, Disposition, SlotArray

__all__ = ["Index"]


class Index:
    """Keys, slots and regions together. All calls come from one thread.

    It reaches the memory through two doors: *erase* is told of slots whose headers must no longer be adopted by a
    later server, *may_change_owner* says whether nothing outside can reach a region of some tenant any more.
    """

    def __init__(
        self,
        regions: Regions,
        policy: Policy,
        erase: Callable[[SlotArray], None],
        may_change_owner: Callable[[int], bool],
        drain_s: float,
    ) -> None:
        """Start with *regions*, all empty; a region that drains longer than *drain_s* is let be."""
        capacity = len(regions.owner) * regions.stride
        self.slots = SlotTable(capacity)
        self.regions = regions
        self.scopes = Scopes()
        self.journal = Journal()
        self.shares = Shares(regions)
        self.chunks = 0
        self.pinned_bytes = 0
        self.lapsed_bytes = 0
        self.evicted = 0
        self._policy = policy
        self._evictor = Evictor(self.slots, regions, policy)
        self._erase = erase
        self._may_change_owner = may_change_owner
        self._drain_s = drain_s

    def bytes_of(self, slots: SlotArray) -> NDArray[np.int64]:
        """Return the size of each slot."""
        sizes: NDArray[np.int64] = self.regions.slot_bytes[slots // self.regions.stride]
        return sizes

    def owned_by(self, slots: SlotArray, owner: str) -> NDArray[np.bool_]:
        """Return which slots lie in regions of *owner*."""
        mine = np.fromiter((o == owner for o in self.regions.owner), np.bool_, len(self.regions.owner))
        return mine[slots // self.regions.stride]

    # A chunk's life

    def reserve(
        self,
        table: KeyTable,
        cls: SlotClass,
        keys: list[bytes],
        ordinals: NDArray[np.uint32],
        parent: int,
        now_s: float,
    ) -> SlotArray:
        """Take slots for new chunks, for as many of *keys* from the first on as there is room; their writer holds them.

        *parent* is the slot of the chunk before the first one, or -1.
        """
        cls = cls._replace(holder=self.shares.quotas.holder(table.scope.tenant))
        slots = self._allocate(cls, len(keys), now_s)
        keys, ordinals = keys[: len(slots)], ordinals[: len(slots)]
        self._enter(Op.RESERVE, slots, table, keys)
        self._policy.stored(slots, ordinals, parent)
        return slots

    def publish(self, slots: SlotArray) -> None:
        """Make written slots readable."""
        self.slots.commit(slots)
        self.chunks += len(slots)
        self.journal.note(self.slots, slots, stored=True)

    def condemn(self, slots: SlotArray) -> None:
        """Take *slots* out of the index for ever; each is free once its last holder went."""
        written = self.slots.phase[slots] == WRITING
        self.slots.condemn(slots)
        self.journal.note(self.slots, slots[~written], stored=False)
        self._forget_keys(slots)
        self.chunks -= len(slots) - int(np.count_nonzero(written))
        self.lapsed_bytes += int(self.bytes_of(slots[written]).sum())
        self._release(slots[~written])

    def abort(self, slots: SlotArray) -> None:
        """Learn that the writers of *slots* are over and their bytes not wanted."""
        lapsed = self.slots.phase[slots] == LAPSED
        self.slots.abort(slots)
        self._forget_keys(slots[~lapsed])
        self.lapsed_bytes -= int(self.bytes_of(slots[lapsed]).sum())
        self._release(slots)

    def pin(self, slots: SlotArray, count: int) -> None:
        """Add *count* pins to each of some readable slots of one size."""
        fresh = self.slots.pin(slots, count)
        if fresh:
            self.pinned_bytes += fresh * int(self.bytes_of(slots[:1])[0])

    def unpin(self, slots: SlotArray, counts: NDArray[np.int32] | int) -> None:
        """Take *counts* pins from each slot; condemned ones without any are free."""
        last = slots[self.slots.unpin(slots, counts)]
        self.pinned_bytes -= int(self.bytes_of(last).sum())
        self._free(self.slots.unheld(last))

    def used(self, slots: SlotArray, ordinals: NDArray[np.uint32]) -> None:
        """Tell the policy that one request uses *slots*."""
        self._policy.used(slots, ordinals)

    # What a former server left

    def adopt(self, slots: SlotArray, table: KeyTable, keys: list[bytes], ordinals: NDArray[np.uint32]) -> None:
        """Take over complete slots of an adopted region."""
        self._enter(Op.ADOPT, slots, table, keys)
        self._policy.stored(slots, ordinals, -1)
        self.chunks += len(slots)

    def seize(self, slots: SlotArray) -> None:
        """Take over slots of an adopted region that a former client may still write to."""
        self.slots.take(Op.SEIZE, slots, 0, [b""] * len(slots))
        self.lapsed_bytes += int(self.bytes_of(slots).sum())

    # Making room

    def evict_coldest(self, count: int, holder: str = EVERYBODY) -> int:
        """Evict the *count* least valuable chunks of a holder, or as many as nobody holds; returns how many."""
        return self._evict(self._evictor.coldest(count, holder))

    def settle(self, now_s: float) -> None:
        """Go on draining: evict what was let go since, and let a region be that is held for too long."""
        for region in list(self.regions.draining.values()):
            self._evict(self._evictor.evictable(region))
            since_s = region.draining_since_s
            patient = region.number in self.regions.leaving  # its memory is to go, however long that takes
            if since_s is not None and region.used and now_s - since_s >= self._drain_s and not patient:
                self.regions.undrain(region)

    def begin_to_empty(self, allowed: Callable[[Region], bool], now_s: float, *, retire: bool = False) -> bool:
        """Begin to empty the cheapest allowed region, to be retired then or not; False if there is none."""
        found = self._evictor.cheapest(allowed)
        if found is None:
            return False
        region = found[0]
        if retire:
            self.regions.leaving.add(region.number)
        self._evictor.forget(region.cls)
        self.regions.drain(region, now_s)
        self._evict(self._evictor.evictable(region))
        return True

    def may_change_owner(self, number: int) -> bool:
        """True if nothing outside can reach a region."""
        return self._reachable(number, SERVER_OWNED)

    def why_full(self, tenant: str) -> Disposition:
        """Say why no slot could be freed: the share is used up, readers pin them, or writers alone hold them."""
        if self.shares.quotas and self.shares.used_up(self.shares.quotas.holder(tenant)):
            return Disposition.QUOTA
        return Disposition.PINNED if self.pinned_bytes else Disposition.FULL

    def draining(self) -> int:
        """Return how many regions are being drained."""
        return len(self.regions.draining)

    def _allocate(self, cls: SlotClass, count: int, now_s: float) -> SlotArray:
        slots = self.regions.take(cls, count)
        while len(slots) < count and self._make_room(cls, count - len(slots), now_s):
            slots = np.concatenate((slots, self.regions.take(cls, count - len(slots))))
        return slots

    def _make_room(self, cls: SlotClass, count: int, now_s: float) -> bool:
        """Free at least one slot of a class in the cheapest way; False if everything is held."""
        if self._open_empty(cls) or (self.shares.quotas and self._reclaim(cls, now_s)):
            return True
        own = self._evictor.victims(cls, count)
        if own.fresh or not len(own.slots):
            # Only then is the price of another class's region worth computing.
            other = self._evictor.cheapest(lambda r: self._convertible(r, cls))
            if other and not other[1] and other[2] < own.cost():
                return self._convert(other[0], cls, now_s)
            if other and not len(own.slots) and own.fresh:
                self._start_drain(other[0], now_s)
        return self._evict(own.slots) > 0 or not own.fresh

    def _convertible(self, region: Region, cls: SlotClass) -> bool:
        """True if a region of another class may become one of *cls*: within the same share, and out of reach."""
        other = region.cls != cls and region.cls.holder == cls.holder
        return other and self._reachable(region.number, cls.owner)

    def _reclaim(self, cls: SlotClass, now_s: float) -> bool:
        """Take a region from a holder that has more than its share, for one that has less."""
        over = set() if self.shares.used_up(cls.holder) else self.shares.over()
        found = self._evictor.cheapest(lambda r: r.cls.holder in over and self._reachable(r.number, cls.owner))
        return found is not None and not found[1] and self._convert(found[0], cls, now_s)

    def _open_empty(self, cls: SlotClass) -> bool:
        if self.shares.used_up(cls.holder):
            return False
        empty, owners = self.regions.empty, self.regions.owner
        # First what this owner's clients may have mapped anyway: nobody else can have it before they let go.
        number = next((n for n in reversed(empty) if owners[n] == cls.owner), None)
        if number is None:
            number = next((n for n in reversed(empty) if self._reachable(n, cls.owner)), None)
        if number is None:
            return False
        try:
            return self.regions.open(number, cls).count > 0
        except PoolFull:  # the memory behind the arena is less than promised: make do with what is cut already
            return False

    def _reachable(self, number: int, owner: str) -> bool:
        """True if a region may serve *owner*: its former owner's clients cannot reach it."""
        former = self.regions.owner[number]
        return former in (None, SERVER_OWNED, owner) or self._may_change_owner(number)

    def _convert(self, region: Region, cls: SlotClass, now_s: float) -> bool:
        self._evictor.forget(cls)
        self.regions.drain(region, now_s)
        self._evict(self._evictor.evictable(region))
        return self._open_empty(cls)

    def _start_drain(self, region: Region, now_s: float) -> None:
        """Begin to empty the least held region, one at a time."""
        self.settle(now_s)
        if not self.draining():
            self.regions.drain(region, now_s)
            self._evict(self._evictor.evictable(region))

    def _evict(self, slots: SlotArray) -> int:
        if len(slots):
            self.condemn(slots)
            self.evicted += len(slots)
        return len(slots)

    # Bookkeeping

    def _enter(self, op: Op, slots: SlotArray, table: KeyTable, keys: list[bytes]) -> None:
        self.slots.take(op, slots, table.number, keys)
        table.slots.update(zip(keys, slots.tolist(), strict=True))

    def _forget_keys(self, slots: SlotArray) -> None:
        numbers = self.slots.table[slots]
        for number in set(numbers.tolist()):
            keys = self.slots.key[slots[numbers == number]].tolist()
            deque(map(self.scopes.numbered(number).slots.pop, keys), maxlen=0)

    def _release(self, slots: SlotArray) -> None:
        """Erase the headers of slots that nobody writes any more, and free those that nobody reads."""
        if len(slots):
            self._erase(slots)
            self._free(self.slots.unheld(slots))

    def _free(self, slots: SlotArray) -> None:
        if len(slots):
            self.slots.free(slots)
            self.regions.give(slots)
