# SPDX-License-Identifier: Apache-2.0
"""One load under way: PrepareRetrieve, the scatters, one CommitRetrieve; what is not vouched for is bad."""

import logging
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvpool.client.ahead import Ahead
from kvpool.client.call import Call
from kvpool.client.channel import Errand, Wanted, only
from kvpool.client.client_moved import MappedReader
from kvpool.client.jobs import LoadJob
from kvpool.client.ledger import Ledger
from kvpool.client.ports import BlockPort
from kvpool.client.ring_part import RingPart
from kvpool.client.ringing import RingKeeper
from kvpool.client.streamed import StreamedReader
from kvpool.client.supervise import attempt
from kvpool.model.checksum import CHECKSUM_BYTES, ChecksumKind, can_verify, checksum
from kvpool.model.errors import CacheError, Malformed
from kvpool.model.slots import Disposition
from kvpool.wire.codec import checksums_of, flags_of, placements_of
from kvpool.wire.messages import CommitRetrieve, PrepareRetrieve, Readable, Retrieved

__all__ = ["Loading", "blocks_of"]

log = logging.getLogger("kvpool.client")


def blocks_of(job: LoadJob, failed: NDArray[np.bool_]) -> frozenset[int]:
    """Return the blocks of the *failed* chunks, without those that the job leaves alone."""
    return frozenset(
        block
        for chunk in np.flatnonzero(failed).tolist()
        for block in job.block_ids[chunk, job.skipped(chunk) :].tolist()
    )


class Loading:
    """A LoadJob in one session. ``run`` and ``abandon`` begin its end, one of them, once."""

    def __init__(
        self, errand: Errand, blocks: BlockPort, job: LoadJob, ledger: Ledger, rings: RingKeeper | None = None
    ) -> None:
        self.job = job
        self._errand = errand
        self._copying = errand.copying()
        self._blocks = blocks
        self._ledger = ledger
        self._ring = RingPart(rings, job, self._moved, skip_blocks=job.skip_blocks)
        self._ahead: Ahead[Retrieved] = Ahead()
        self._all_by_ring = self._alone = False
        self._committed: Call[Retrieved] | None = None
        self._concluding = False
        """True once it is the ring that ends the load."""
        whole = int(job.block_ids.shape[1])
        ends: NDArray[np.int64] = np.arange(1, job.chunks + 1, dtype=np.int64) * whole
        self._needed: NDArray[np.bool_] = ends > job.skip_blocks
        self._written = np.zeros(job.chunks, dtype=np.bool_)
        self._vouched = np.zeros(job.chunks, dtype=np.bool_)
        self._wrong = np.zeros(job.chunks, dtype=np.uint8)
        self._sums = np.zeros(job.chunks, dtype=f"V{CHECKSUM_BYTES}")
        self._kinds = np.zeros(job.chunks, dtype=np.uint8)
        self._lengths = np.zeros(job.chunks, dtype=np.uint64)
        self.prepared: Call[Readable] = errand.ask(
            PrepareRetrieve(lookup_id=job.lookup_id, group=job.group, shard=job.shard, first=job.first, end=job.end)
        )

    def due_in_s(self, now_s: float) -> float:
        """See Work: due with the server's answer, or when time is up."""
        return 0.0 if self.prepared.done() else self._copying.ends_s - now_s

    def can_prepare(self) -> bool:
        """See Work: once the question is out, which it would only hold up."""
        return self._ring.is_new() and self.prepared.sent

    def prepare(self) -> None:
        """See Work: all that was found is most likely still there."""
        self._ring.prepare(np.flatnonzero(self._needed).tolist(), gather=False)

    def run(self) -> None:
        """Do it; see Work."""
        failed = attempt("a load", self._transfer)
        if not self._concluding:
            self._written &= failed is None
            self._finish()

    def settle(self) -> None:
        """Wait until all chunks are in their blocks; see Work."""
        if self._concluding and (move := self._ring.move) is not None:
            if self._errand.moving and self._all_by_ring:
                # Answered once the mover is through, and of no account if it does not move all of it.
                self._ahead.send(partial(self._commit, moving=True))
            move.finish()

    def _conclude(self) -> None:
        """Learn what is vouched for."""
        attempt("a load's end", self._judge)
        self._end()

    def abandon(self, reason: str) -> None:
        """End it without a byte read: all its blocks are bad."""
        self._fail(reason)
        self._commit()
        self._end()

    def _end(self) -> None:
        good = self._written & self._vouched
        failed = self._needed & ~good
        self._ledger.count("chunks_loaded", int(good.sum()))
        self._ledger.count("chunks_load_lost", int(failed.sum()))
        self._ledger.count("bytes_loaded", int(self._lengths[good].sum()))
        self._ledger.end_load(self.job.request_id, blocks_of(self.job, failed))

    def _transfer(self) -> None:
        try:
            if self.prepared.done():
                self._receive(self._answer())
            else:
                self._fail("late")
        except CacheError as e:
            self._fail(e.code, str(e))

    def _finish(self) -> None:
        """Commit, whatever happened: this reader's pins go."""
        committed = self._ahead.take()
        if committed is None or not self._written.all():
            committed = self._commit()
        if self._written.any():
            # The lane goes on with the next load; the link's thread hears the answer.
            self._committed = committed
            committed.then(self._conclude)
        else:
            self._end()

    def _answer(self) -> NDArray[np.void]:
        _, frames = self.prepared.result()
        if len(frames) != 3:  # noqa: PLR2004 - placements, checksums, kinds
            raise Malformed(f"{len(frames)} raw frames in a Readable instead of three")
        rows = placements_of(frames[0], self.job.chunks)
        self._sums = checksums_of(frames[1], self.job.chunks)
        self._kinds = flags_of(frames[2], self.job.chunks)
        self._lengths = rows["length"]
        return rows

    def _receive(self, rows: NDArray[np.void]) -> None:
        job, way = self.job, rows["disposition"]
        in_place = np.flatnonzero(self._needed & (way == Disposition.IN_PLACE)).tolist()
        streamed = np.flatnonzero(self._needed & (way == Disposition.STREAM)).tolist()
        if in_place and (grant := self.prepared.result()[0].grant):
            self._receive_by_ring(in_place, grant, alone=not streamed)
        elif in_place:
            MappedReader(self._copying).each([Wanted(c, rows[c]) for c in in_place], self._scatter)
        if streamed:
            wanted = [Wanted(c, rows[c]) for c in streamed]
            StreamedReader(self._copying, job.lookup_id, job.group, job.shard, job.first).each(wanted, self._scatter)

    def _receive_by_ring(self, chunks: list[int], grant: bytes, *, alone: bool) -> None:
        """Hand chunks to the ring at once; *alone*: when it is done with them, so is the load."""
        if (taken := self._ring.take(chunks)) is None:
            self._ledger.count("loads_without_ring")
            return
        ring, move = taken
        self._concluding = self._alone = alone
        ring.load(move, grant, self._copying.ends_s)
        self._all_by_ring = len(chunks) == self.job.chunks
        if not alone:
            move.finish()

    def _moved(self) -> None:
        """Learn what the ring moved. No kernel of it can still write."""
        attempt("a load's moves", self._take)
        if self._alone:
            self._finish()

    def _take(self) -> None:
        move = self._ring.move
        assert move is not None
        if move.lost is None:
            log.debug("load of %s stopped: the ring is retired", self.job.request_id)
            return
        self._wrong[[*move.wrong]] = 1
        self._ledger.count("chunks_checksum_wrong", len(move.wrong))
        self._written[[*move.chunks]] = True
        self._written[[*move.lost]] = False

    def _scatter(self, chunk: int, data: memoryview) -> None:
        """Put one chunk into its blocks, unless its checksum or the time is wrong."""
        if not self._copying.left_s():
            return
        if self.job.after is not None:
            self.job.after.wait()
        if not _matches(data, int(self._kinds[chunk]), self._sums[chunk].tobytes()):
            self._wrong[chunk] = 1
            self._ledger.count("chunks_checksum_wrong")
            return
        self._blocks.scatter(self.job.group, self.job.block_ids[chunk], self.job.skipped(chunk), data)
        self._written[chunk] = True

    def _commit(self, *, moving: bool = False) -> Call[Retrieved]:
        job = self.job
        request = CommitRetrieve(
            lookup_id=job.lookup_id, group=job.group, shard=job.shard, first=job.first, end=job.end, moving=moving
        )
        return self._errand.conclude(request, (self._wrong.tobytes(),))

    def _judge(self) -> None:
        """Learn which chunks the server vouches for; without its word none is good."""
        committed = self._committed
        assert committed is not None
        try:
            self._vouched = flags_of(only(committed.result()[1]), self.job.chunks) == Disposition.VOUCHED
        except CacheError as e:
            self._fail(e.code, f"not vouched for: {e}")

    def _fail(self, reason: str, detail: str = "") -> None:
        self._ledger.count(f"loads_failed_{reason}")
        log.debug("load of %s failed: %s %s", self.job.request_id, reason, detail)


def _matches(data: memoryview, kind: int, expected: bytes) -> bool:
    """True if *data* has this checksum, or if it has none that can be verified here."""
    if kind not in (ChecksumKind.XXH3, ChecksumKind.BLAKE3) or not can_verify(ChecksumKind(kind)):
        return True
    return checksum(data, ChecksumKind(kind)) == expected
