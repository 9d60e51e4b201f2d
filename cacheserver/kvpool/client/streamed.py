# SPDX-License-Identifier: Apache-2.0
"""Streamed mode: bytes travel in frames over the bulk connection, in pieces of at most ``limits.frame_bytes``.

The Link sends no more pieces at a time than the server gives credits; here only the memory in front of it is bounded.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvpool.client.call import Call
from kvpool.client.channel import Errand, Fill, Use, Wanted, only
from kvpool.model.checksum import checksum
from kvpool.model.errors import CacheError, Malformed
from kvpool.wire.messages import Bytes, Limits, ReadChunk, WriteChunk, Wrote

__all__ = ["StreamedReader", "StreamedWriter"]


class StreamedWriter:
    """A Writer over the bulk connection."""

    def __init__(self, errand: Errand, store_id: bytes, first: int) -> None:
        """Write chunks that count from *first* in the token sequence."""
        self._errand = errand
        self._store_id = store_id
        self._first = first
        self._under_way: deque[tuple[int, list[Call[Wrote]], bytearray]] = deque()
        self._spare: list[bytearray] = []
        self._made: dict[int, bytes] = {}

    def put(self, chunk: int, row: np.void, fill: Fill) -> None:
        """Make one chunk's bytes in a buffer and queue its pieces; see Writer."""
        length = int(row["length"])
        buffer = self._buffer(length)
        view = memoryview(buffer)[:length]
        fill(view)
        digest = checksum(view)
        calls = [
            self._errand.ask(
                WriteChunk(store_id=self._store_id, chunk=self._first + chunk, offset=offset),
                (view[offset:end],),
                bulk=True,
            )
            for offset, end in _pieces(length, self._errand.limits)
        ]
        self._under_way.append((chunk, calls, buffer))
        self._made[chunk] = digest

    def finish(self) -> dict[int, bytes]:
        """Wait for the pieces under way; see Writer."""
        while self._under_way:
            self._settle()
        return self._made

    def _buffer(self, length: int) -> bytearray:
        while len(self._under_way) >= _chunks_ahead(length, self._errand.limits):
            self._settle()
        while self._spare:
            if len(buffer := self._spare.pop()) >= length:
                return buffer
        return bytearray(length)

    def _settle(self) -> None:
        """Wait for the oldest chunk."""
        chunk, calls, buffer = self._under_way.popleft()
        for call in calls:
            call.wait()
        if any(call.error() for call in calls):
            # Its buffer is not used again: a piece may still wait to be sent.
            del self._made[chunk]
        else:
            self._spare.append(buffer)


class StreamedReader:
    """A Reader over the bulk connection."""

    def __init__(self, errand: Errand, lookup_id: bytes, group: int, shard: int, first: int) -> None:
        """Read for chunks that count from *first* in the lookup."""
        self._errand = errand
        self._lookup_id = lookup_id
        self._group = group
        self._shard = shard
        self._first = first

    def each(self, wanted: Sequence[Wanted], use: Use) -> None:
        """Fetch the chunks, some ahead of the one that is used; see Reader."""
        longest = max((int(w.row["length"]) for w in wanted), default=1)
        coming = iter([*wanted])
        ahead = deque((w, self._ask(w)) for w in islice(coming, _chunks_ahead(longest, self._errand.limits)))
        while ahead:
            item, calls = ahead.popleft()
            try:
                data = _joined(calls, int(item.row["length"]))
            except CacheError:
                data = None  # never used: lost
            ahead.extend((w, self._ask(w)) for w in islice(coming, 1))
            if data is not None:
                use(item.chunk, data)

    def _ask(self, item: Wanted) -> list[Call[Bytes]]:
        return [
            self._errand.ask(
                ReadChunk(
                    lookup_id=self._lookup_id,
                    chunk=self._first + item.chunk,
                    offset=offset,
                    length=end - offset,
                    group=self._group,
                    shard=self._shard,
                ),
                bulk=True,
            )
            for offset, end in _pieces(int(item.row["length"]), self._errand.limits)
        ]


def _joined(calls: Sequence[Call[Bytes]], length: int) -> memoryview:
    """Wait for the pieces of one chunk and put them together; one piece alone is not copied.

    Raises:
        CacheError: a piece did not come, or the pieces are not the chunk.
    """
    pieces = [_piece(call) for call in calls]
    if sum(len(piece) for piece in pieces) != length:
        raise Malformed(f"{sum(len(p) for p in pieces)} bytes came for a chunk of {length}")
    if len(pieces) == 1:
        return pieces[0]
    return memoryview(b"".join(pieces))


def _piece(call: Call[Bytes]) -> memoryview:
    return memoryview(only(call.result()[1])).toreadonly()


def _pieces(length: int, limits: Limits) -> list[tuple[int, int]]:
    """Cut *length* bytes into pieces that fit a frame."""
    return [(offset, min(offset + limits.frame_bytes, length)) for offset in range(0, length, limits.frame_bytes)]


def _chunks_ahead(length: int, limits: Limits) -> int:
    """How many chunks keep all credits in use while one more is worked on."""
    pieces = _pieces(length, limits) or [(0, 1)]
    small = limits.bulk_window * limits.frame_bytes // (pieces[0][1] - pieces[0][0])
    frames = max(limits.bulk_window, min(limits.bulk_frames, small))
    return -(-frames // len(pieces)) + 1
