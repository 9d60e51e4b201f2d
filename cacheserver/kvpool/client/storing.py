# SPDX-License-Identifier: Apache-2.0
"""One store under way: PrepareStore at once, the gathers once the blocks are final, one CommitStore."""

import logging
import os
import threading
from functools import partial
from time import monotonic
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvpool.client.ahead import Ahead
from kvpool.client.call import Call
from kvpool.client.channel import Errand, Writer, only
from kvpool.client.client_moved import MappedWriter
from kvpool.client.jobs import StoreJob
from kvpool.client.ledger import Ledger
from kvpool.client.ports import BlockPort
from kvpool.client.ring_part import RingPart
from kvpool.client.ringing import RingKeeper
from kvpool.client.streamed import StreamedWriter
from kvpool.client.supervise import attempt
from kvpool.model.checksum import CHECKSUM_BYTES, PREFERRED, ChecksumKind
from kvpool.model.errors import CacheError
from kvpool.model.identity import Mode
from kvpool.model.slots import PLACEMENT, Disposition
from kvpool.wire.codec import flags_of, placements_of
from kvpool.wire.messages import CommitStore, PrepareStore, Stored

__all__ = ["Storing"]

_READY_POLL_S: Final = 0.01
"""How often a store looks whether its blocks are final: the engine's event cannot wake the lane."""


_NAMES: Final = {int(d): d.name.lower() for d in Disposition}

log = logging.getLogger("kvpool.client")


class _StoppedError(Exception):
    """No further gather of this store begins."""


class Storing:
    """A StoreJob in one session. ``run`` and ``abandon`` begin its end, one of them, once."""

    def __init__(
        self,
        errand: Errand,
        mode: Mode,
        blocks: BlockPort,
        job: StoreJob,
        ledger: Ledger,
        rings: RingKeeper | None = None,
    ) -> None:
        self.job = job
        self._errand = errand
        self._copying = errand.copying()
        self._mode = mode
        self._blocks = blocks
        self._ledger = ledger
        self._store_id = os.urandom(16)
        self._cancelled = False
        self._gathering = threading.Lock()
        self._told = threading.Lock()
        self._ring = RingPart(rings, job, self._moved, read=self._end_reading)
        self._placed = np.empty(0, dtype=PLACEMENT)
        self._ahead: Ahead[Stored] = Ahead()
        self._committed: Call[Stored] | None = None
        self._concluding = False
        """True once something that is under way will end the store."""
        self._complete = np.zeros(job.chunks, dtype=np.uint8)
        self._checksums = np.zeros((job.chunks, CHECKSUM_BYTES), dtype=np.uint8)
        self.prepared = errand.ask(
            PrepareStore(
                request_id=job.request_id,
                store_id=self._store_id,
                group=job.group,
                shard=job.shard,
                first=job.first,
                parent=job.parent,
            ),
            (job.digests,),
        )

    def due_in_s(self, now_s: float) -> float:
        """See Work: due with the server's answer and final blocks, or when time is up."""
        left_s = self._errand.ends_s - now_s
        if not self.prepared.done():
            return left_s
        if self.prepared.error() is None and not self.job.ready.is_set():
            return min(left_s, _READY_POLL_S)
        return 0.0

    def can_prepare(self) -> bool:
        """See Work: once the question is out, which it would only hold up, and the blocks are final."""
        return self._ring.is_new() and self.prepared.sent and self.job.ready.is_set()

    def prepare(self) -> None:
        """See Work: the server seldom has some of what the engine computed anew, so all of it is worth gathering."""
        self._ring.prepare(range(self.job.chunks), gather=True)

    def run(self) -> None:
        """Do it; see Work."""
        attempt("a store", self._transfer)
        if not self._concluding:
            self._end()

    def settle(self) -> None:
        """Wait until all chunks are in their slots; see Work."""
        if self._concluding and (move := self._ring.move) is not None:
            if self._errand.moving:
                # Answered once the mover is through, and of no account if it does not move all of it.
                self._ahead.send(partial(self._commit, self._wanted(), moving=True))
            move.finish()

    def _conclude(self) -> None:
        """Learn what was kept."""
        attempt("a store's end", self._account)
        self._end()

    def abandon(self, reason: str) -> None:
        """End it without a byte sent; cancelled before, if anything was prepared."""
        self._drop(reason)
        self._commit(self._complete)
        self._end()

    def cancel(self, timeout_s: float) -> bool:
        """Begin no gather any more; returns whether none is running after at most *timeout_s*. Any thread."""
        ends_s, self._cancelled = monotonic() + timeout_s, True
        if not self._ring.cancel(timeout_s) or not self._gathering.acquire(timeout=max(0.0, ends_s - monotonic())):
            return False
        self._gathering.release()
        return True

    def _end(self) -> None:
        self._end_reading()
        self._ledger.end_store(self.job.request_id)

    def _end_reading(self) -> None:
        """No block is read any more; told once. Any thread."""
        with self._told:
            told, first = self.job.gathered, not self.job.gathered.is_set()
            told.set()
        if first:
            self._ledger.end_reading(self.job.request_id)

    def _transfer(self) -> None:
        """Send what the server wants and commit what got there; what did not is given back by the same commit."""
        rows = self._rows()
        if rows is not None and not (rows["disposition"] == Disposition.WRITE).any():
            # The server keeps no store of which nothing is to be written: there is nothing to commit.
            self._ring.drop(self._copying.left_s())
            self._count(rows["disposition"])
            return
        if rows is not None:
            self._placed = rows
        try:
            if rows is not None and (grant := self.prepared.result()[0].grant):
                self._send_by_ring(rows, grant)
            elif rows is not None:
                self._send(rows)
        finally:
            if not self._concluding:
                self._ring.drop(self._copying.left_s())
                self._finish()

    def _finish(self) -> None:
        """Commit what got there; what did not is given back by the same commit."""
        committed = self._ahead.take()
        if committed is None or not self._is_whole():
            committed = self._commit(self._complete)
        if len(self._placed):
            # Also after a failure the store ends only when the server has answered: what it kept is counted, and seen.
            # The lane goes on with the next store; the link's thread hears the answer.
            self._concluding, self._committed = True, committed
            committed.then(self._conclude)

    def _rows(self) -> NDArray[np.void] | None:
        """Return the server's answer, or None if there will be no transfer."""
        if not self.prepared.done() or (self.prepared.error() is None and not self.job.ready.is_set()):
            self._drop("late")
        elif (error := self.prepared.error()) is not None:
            self._drop(error.code, str(error))
        else:
            return placements_of(only(self.prepared.result()[1]), self.job.chunks)
        return None

    def _drop(self, reason: str, detail: str = "") -> None:
        self._ledger.count(f"stores_dropped_{reason}")
        log.debug("store of %s dropped: %s %s", self.job.request_id, reason, detail)

    def _send_by_ring(self, rows: NDArray[np.void], grant: bytes) -> None:
        """Hand all chunks to the ring at once; the mover makes their checksums."""
        taken = self._ring.take(np.flatnonzero(rows["disposition"] == Disposition.WRITE).tolist())
        if taken is not None:
            ring, move = taken
            self._concluding = True
            ring.store(move, grant, self._copying.ends_s)
        elif not self._cancelled:
            self._drop("ring")

    def _moved(self) -> None:
        """Commit what the ring moved."""
        attempt("a store's moves", self._take)
        self._finish()

    def _take(self) -> None:
        self._end_reading()
        move = self._ring.move
        assert move is not None
        if move.lost is None:
            log.debug("store of %s stopped: the ring is retired", self.job.request_id)
        else:
            self._complete[[*move.chunks]] = 1
            self._complete[[*move.lost]] = 0

    def _send(self, rows: NDArray[np.void]) -> None:
        if self.job.after is not None:
            self.job.after.wait()
        writer: Writer
        if self._mode is Mode.CLIENT_MOVED:
            writer = MappedWriter(self._copying)
        else:
            writer = StreamedWriter(self._copying, self._store_id, self.job.first)
        try:
            for chunk in np.flatnonzero(rows["disposition"] == Disposition.WRITE).tolist():
                writer.put(chunk, rows[chunk], partial(self._gather, chunk))
        except (CacheError, _StoppedError) as e:
            log.debug("store of %s stopped: %s", self.job.request_id, e)
        finally:
            self._end_reading()
            for chunk, digest in writer.finish().items():
                self._checksums[chunk] = np.frombuffer(digest, dtype=np.uint8)
                self._complete[chunk] = 1

    def _gather(self, chunk: int, out: memoryview) -> None:
        with self._gathering:
            if self._cancelled:
                raise _StoppedError("cancelled")
            if not self._copying.left_s():
                raise _StoppedError("late")
            self._blocks.gather(self.job.group, self.job.block_ids[chunk], out)

    def _commit(self, complete: NDArray[np.uint8], *, moving: bool = False) -> Call[Stored]:
        """End the store at the server: chunks that are not complete are dropped there at once."""
        by_mover = self._ring.move is not None
        kind = ChecksumKind.NONE if by_mover else PREFERRED
        return self._errand.conclude(
            CommitStore(store_id=self._store_id, checksum_kind=kind, moving=moving),
            (complete.tobytes(), b"" if by_mover else self._checksums.tobytes()),
        )

    def _wanted(self) -> NDArray[np.uint8]:
        """Return a mark for each chunk that the server wants."""
        marks: NDArray[np.uint8] = (self._placed["disposition"] == Disposition.WRITE).astype(np.uint8)
        return marks

    def _is_whole(self) -> bool:
        """True if all that the server wants got there."""
        return bool((self._complete == self._wanted()).all())

    def _account(self) -> None:
        """Count what was kept; only what the server says it kept is a success."""
        committed, rows = self._committed, self._placed
        assert committed is not None
        try:
            ends = flags_of(only(committed.result()[1]), self.job.chunks)
        except CacheError as e:
            self._ledger.count("chunks_store_lost", int((rows["disposition"] == Disposition.WRITE).sum()))
            log.debug("store of %s lost: %s", self.job.request_id, e)
            return
        self._count(ends)
        self._ledger.count("bytes_stored", int(rows["length"][ends == Disposition.STORED].sum()))

    def _count(self, ends: NDArray[Any]) -> None:
        for value, amount in enumerate(np.bincount(ends).tolist()):
            if amount:
                self._ledger.count(f"chunks_{_NAMES.get(value, 'unknown')}", amount)
