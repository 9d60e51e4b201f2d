# SPDX-License-Identifier: Apache-2.0
"""Handlers of lookups, stores and loads: the engine decides, they translate. Thread: the loop's."""

import struct
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from kvpool.engine.outcomes import FoundPrefix, ReadPlan
from kvpool.model.checksum import ChecksumKind, can_verify
from kvpool.model.errors import CacheError, UnknownLease
from kvpool.model.slots import CHECK, Disposition
from kvpool.server.calls import Answer, Call
from kvpool.server.dispatch import Dispatcher, Route
from kvpool.server.granted import NO_CHECKS
from kvpool.server.parking import Parking
from kvpool.server.parts import Parts
from kvpool.transfer.mover.messages import Revoked
from kvpool.wire.messages import (
    CommitRetrieve,
    CommitStore,
    Ended,
    EndRequest,
    Events,
    Found,
    Freed,
    FreeLookup,
    Lookup,
    LookupStatus,
    Prepared,
    PrepareRetrieve,
    PrepareStore,
    Readable,
    Retrieved,
    Stored,
    Subscribe,
)

__all__ = ["CachingVerbs"]

log = structlog.get_logger()

_VERIFIABLE: Final = [int(kind) for kind in ChecksumKind if kind and can_verify(kind)]

_NOT_MOVED: Final = "no mover is at it, or not to the end; commit it again once nothing moves"

_Checksums = tuple[bytes | memoryview, int | NDArray[np.uint8]]
"""16 bytes a chunk, or nothing; and how all of them were made, or a kind for each."""


class CachingVerbs:
    """The handlers, and the lookups that wait for more chunks."""

    def __init__(self, parts: Parts) -> None:
        self._engine = parts.engine
        self._answers = parts.answers
        self._clock = parts.clock
        self._rings = parts.rings
        self._parked = Parking()

    def add_to(self, dispatcher: Dispatcher) -> None:
        """Route this class's requests."""
        dispatcher.add(Lookup, Route(handler=self.lookup, frames=1, new_work=True))
        dispatcher.add(LookupStatus, Route(handler=self.lookup_status))
        dispatcher.add(FreeLookup, Route(handler=self.free_lookup, while_expired=True, releases=True))
        dispatcher.add(PrepareStore, Route(handler=self.prepare_store, frames=1, new_work=True))
        dispatcher.add(CommitStore, Route(handler=self.commit_store, frames=2))
        dispatcher.add(PrepareRetrieve, Route(handler=self.prepare_retrieve))
        dispatcher.add(CommitRetrieve, Route(handler=self.commit_retrieve, frames=1))
        dispatcher.add(Subscribe, Route(handler=self.subscribe))
        dispatcher.add(EndRequest, Route(handler=self.end_request, while_expired=True, releases=True))

    def lookup(self, call: Call, request: Lookup) -> Answer:
        """Find and pin the longest prefix."""
        found = self._engine.lookup(
            call.owner.client_id,
            request.request_id,
            request.lookup_id,
            request.shards,
            call.frames[0],
            self._clock(),
        )
        return _found(found)

    def lookup_status(self, call: Call, request: LookupStatus) -> Answer | None:
        """Say how a lookup stands, at once or when it is final."""
        now_s = self._clock()
        found = self._engine.lookup_status(call.owner.client_id, request.lookup_id, now_s)
        if not found.coming or not request.wait_s:
            return _found(found)
        self._answers.hold(call)
        self._parked.park(request.lookup_id, call, now_s + request.wait_s)
        return None

    def free_lookup(self, call: Call, request: FreeLookup) -> Answer:
        """Unpin a range."""
        freed = self._engine.free_lookup(
            call.owner.client_id, request.lookup_id, request.first, request.end, self._clock()
        )
        return Answer(Freed(chunks=freed))

    def prepare_store(self, call: Call, request: PrepareStore) -> Answer:
        """Say where chunks go."""
        placements = self._engine.prepare_store(
            call.owner.client_id,
            request.request_id,
            request.store_id,
            request.group,
            request.shard,
            request.first,
            request.parent,
            call.frames[0],
            self._clock(),
        )
        write = int(np.count_nonzero(placements["disposition"] == Disposition.WRITE))
        grant = self._rings.grant_store(call.owner.client_id, request.store_id, placements)
        return Answer(Prepared(write=write, grant=grant), (placements.tobytes(),))

    def commit_store(self, call: Call, request: CommitStore) -> Answer | None:
        """Publish what was written; what a mover wrote once it says that it writes no more."""
        self._answers.hold(call)
        over = partial(self._commit_moved, call, request)
        if request.moving:
            if not self._rings.await_moved(call.owner.client_id, (request.store_id,), over):
                raise UnknownLease(_NOT_MOVED)
            return None
        if self._rings.revoke_store(call.owner.client_id, request.store_id, over, self._clock()):
            return None
        return self._commit(call, request, call.frames[0], (call.frames[1], request.checksum_kind))

    def _commit_moved(self, call: Call, request: CommitStore, end: Revoked | None, granted: int) -> None:
        """Commit after the mover's word; if it moved less than the client says, nothing of it is believed."""
        if request.moving and end is None:
            self._answers.fail(call, UnknownLease(_NOT_MOVED), self._clock())
            return
        complete: bytes | memoryview = call.frames[0]
        marked = np.frombuffer(complete, dtype=np.uint8)
        if end is not None and end.moved_bytes < int(np.count_nonzero(marked == 1)) * granted:
            log.warning("store.not_moved", client=call.owner.client_id.hex(), moved_bytes=end.moved_bytes)
            complete = bytes(len(marked))
        self._finish(call, partial(self._commit, call, request, complete, _checksums_of(end)))

    def _commit(self, call: Call, request: CommitStore, complete: bytes | memoryview, checksums: _Checksums) -> Answer:
        sums, kind = checksums
        ends = self._engine.commit_store(call.owner.client_id, request.store_id, complete, sums, kind, self._clock())
        stored = int(np.count_nonzero(ends == Disposition.STORED))
        if stored:
            log.debug("chunks.stored", client=call.owner.client_id.hex(), chunks=stored, asked=len(ends))
        return Answer(Stored(stored=stored), (ends.tobytes(),))

    def prepare_retrieve(self, call: Call, request: PrepareRetrieve) -> Answer:
        """Say where chunks lie."""
        plan = self._engine.prepare_retrieve(
            call.owner.client_id,
            request.lookup_id,
            request.group,
            request.shard,
            request.first,
            request.end,
            self._clock(),
        )
        grant = self._rings.grant_load(call.owner.client_id, _load_of(request), plan.placements, _to_verify(plan))
        frames = (plan.placements.tobytes(), plan.checksums.tobytes(), plan.kinds.tobytes())
        return Answer(Readable(chunks=len(plan.kinds), grant=grant), frames)

    def commit_retrieve(self, call: Call, request: CommitRetrieve) -> Answer | None:
        """Vouch for what was read, or not; once a mover has read all of it if it is still at it."""
        if request.moving:
            self._answers.hold(call)
            over = partial(self._vouch_moved, call, request)
            if not self._rings.await_moved(call.owner.client_id, _load_of(request), over):
                raise UnknownLease(_NOT_MOVED)
            return None
        self._rings.revoke_load(call.owner.client_id, _load_of(request), self._clock())
        return self._vouch(call, request)

    def _vouch_moved(self, call: Call, request: CommitRetrieve, end: Revoked | None, _: int) -> None:
        """Vouch after the mover's word."""
        if end is None:
            self._answers.fail(call, UnknownLease(_NOT_MOVED), self._clock())
        else:
            self._finish(call, partial(self._vouch, call, request))

    def _vouch(self, call: Call, request: CommitRetrieve) -> Answer:
        ends = self._engine.commit_retrieve(
            call.owner.client_id,
            request.lookup_id,
            request.group,
            request.shard,
            request.first,
            request.end,
            call.frames[0],
            self._clock(),
        )
        return Answer(Retrieved(vouched=int(np.count_nonzero(ends == Disposition.VOUCHED))), (ends.tobytes(),))

    def end_request(self, call: Call, request: EndRequest) -> Answer:
        """Free all lookups of one engine request."""
        return Answer(Ended(leases=self._engine.end_request(call.owner.client_id, request.request_id, self._clock())))

    def subscribe(self, call: Call, request: Subscribe) -> Answer:
        """Tell what came and went since."""
        batch = self._engine.changes.take(call.owner.client_id, request.after, self._clock())
        events = Events(sequence=batch.sequence, snapshot=batch.snapshot, more=batch.more)
        return Answer(events, (batch.stored, batch.digests))

    def resolve(self) -> None:
        """Answer the parked calls of lookups whose answer changed; call it after everything that may change one."""
        for lookup_id in self._engine.take_resolved():
            for call in self._parked.of(lookup_id):
                self._tell(lookup_id, call, only_final=True)

    def expire(self, now_s: float) -> None:
        """Answer parked calls that waited long enough with how things stand."""
        for lookup_id, call in self._parked.due(now_s):
            self._tell(lookup_id, call, only_final=False)

    def next_deadline_s(self) -> float | None:
        """Return when the next parked call has waited long enough."""
        return self._parked.next_deadline_s()

    def _finish(self, call: Call, answer: Callable[[], Answer]) -> None:
        """End a call that was held with what *answer* returns, or the error that it raises."""
        try:
            self._answers.finish(call, answer(), self._clock())
        except CacheError as e:
            self._answers.fail(call, e, self._clock())

    def _tell(self, lookup_id: bytes, call: Call, *, only_final: bool) -> None:
        now_s = self._clock()
        try:
            found = self._engine.lookup_status(call.owner.client_id, lookup_id, now_s)
        except CacheError as e:
            self._answers.fail(call, e, now_s)
            return
        if not (only_final and found.coming):
            self._answers.finish(call, _found(found), now_s)


def _checksums_of(end: Revoked | None) -> _Checksums:
    """Return the checksums that a mover made; what a client says of bytes that it did not write counts for nothing."""
    if end is None or not end.checks:
        return b"", int(ChecksumKind.NONE)
    made = np.frombuffer(end.checks, dtype=CHECK)
    return made["checksum"].tobytes(), made["kind"].copy()


def _to_verify(plan: ReadPlan) -> NDArray[np.void]:
    """Return what a mover has to verify of a load."""
    if not plan.kinds.any():
        return NO_CHECKS
    checks = np.zeros(len(plan.kinds), dtype=CHECK)
    checks["checksum"] = plan.checksums
    checks["kind"] = np.where(np.isin(plan.kinds, _VERIFIABLE), plan.kinds, ChecksumKind.NONE)
    return checks


def _found(found: FoundPrefix) -> Answer:
    return Answer(Found(chunks=found.chunks, coming=found.coming, reason=found.reason.value))


def _load_of(request: PrepareRetrieve | CommitRetrieve) -> tuple[bytes, ...]:
    """Name one reader's load: the lookup, and which part of it."""
    return request.lookup_id, struct.pack("<HHQQ", request.group, request.shard, request.first, request.end)
