# SPDX-License-Identifier: Apache-2.0
"""Handlers of streamed bytes: they take and give credits, a lane copies. Thread: the loop's."""

from functools import partial
from typing import Final

from kvpool.config import LimitConfig
from kvpool.metrics.catalogue import series_key
from kvpool.model.errors import Busy, CacheError, LimitExceeded, Malformed, UnknownLease
from kvpool.server.calls import Answer, Call, Client
from kvpool.server.dispatch import Dispatcher, Place, Route
from kvpool.server.lanes import Copy
from kvpool.server.parts import Parts
from kvpool.wire.messages import Bytes, ReadChunk, WriteChunk, Wrote

__all__ = ["BulkVerbs", "most_frames"]

_MOST_FRAMES: Final = 64
_FRAMES_SHARE: Final = 4
"""A quarter of what one client may have under way, so that control requests always find room."""
_UNREAD_WINDOWS: Final = 4
"""Large replies may wait for zmq to let go of them a little longer than for the client to read them."""
_IN: Final = series_key("kvpool_bulk_bytes_total", direction="in")
_OUT: Final = series_key("kvpool_bulk_bytes_total", direction="out")


class BulkVerbs:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._limits = parts.config.limits
        self.running = 0
        """Copies that lanes have."""

    def add_to(self, dispatcher: Dispatcher) -> None:
        """Route this class's requests."""
        dispatcher.add(WriteChunk, Route(handler=self.write_chunk, frames=1, place=Place.BULK))
        dispatcher.add(ReadChunk, Route(handler=self.read_chunk, place=Place.BULK))

    def write_chunk(self, call: Call, request: WriteChunk) -> None:
        """Have one piece copied into its slot."""
        client, data = call.owner, call.frames[0]
        if not len(data):
            raise Malformed("a piece of no bytes")
        self._take_credit(client, len(data))
        target = self._parts.engine.begin_write(
            client.client_id, request.store_id, request.chunk, request.offset, len(data)
        )
        self._start(call, Copy(call, data, target, len(data), partial(self._wrote, request)))

    def read_chunk(self, call: Call, request: ReadChunk) -> None:
        """Have one piece copied out of its slot."""
        client = call.owner
        if request.length > self._limits.frame_bytes:
            raise LimitExceeded(f"{request.length} bytes in one frame; at most {self._limits.frame_bytes}")
        self._take_credit(client, request.length)
        self._check_unread(client, request.length)
        source = self._parts.engine.begin_read(
            client.client_id,
            request.lookup_id,
            request.group,
            request.shard,
            request.chunk,
            request.offset,
            request.length,
            self._parts.clock(),
        )
        self._start(call, Copy(call, source, None, request.length, partial(self._read, request)))

    def _take_credit(self, client: Client, size: int) -> None:
        if not self._fits(client.copies, client.copied_bytes + size):
            raise Busy(
                f"{client.copies} bulk frames of this client are under way, {client.copied_bytes} bytes; "
                f"its window is {self._limits.bulk_window} of {self._limits.frame_bytes}"
            )

    def _check_unread(self, client: Client, size: int) -> None:
        """Refuse to fill the memory with replies that the client asks for and does not read."""
        client.unread = [large for large in client.unread if not large.done]
        unread_bytes = sum(large.size for large in client.unread)
        if not self._fits(len(client.unread), unread_bytes + size, _UNREAD_WINDOWS):
            raise Busy(f"{len(client.unread)} large replies wait for this client to read them")

    def _fits(self, frames: int, size: int, windows: int = 1) -> bool:
        """Return whether one more frame fits *windows* windows that hold *frames*; *size* counts it already."""
        limits = self._limits
        if frames < windows * limits.bulk_window:
            return True
        return frames < windows * most_frames(limits) and size <= windows * limits.bulk_window * limits.frame_bytes

    def _start(self, call: Call, copy: Copy) -> None:
        self._parts.answers.hold(call)
        call.owner.copies += 1
        call.owner.copied_bytes += copy.size
        self.running += 1
        self._parts.lanes.submit(call.owner.lane, copy)

    def _wrote(self, request: WriteChunk, copy: Copy) -> None:
        parts, size = self._parts, len(copy.call.frames[0])
        self._give_credit(copy)
        try:
            parts.engine.end_write(
                copy.call.owner.client_id, request.store_id, request.chunk, size, parts.clock(), ok=copy.ok
            )
        except CacheError as e:
            parts.answers.fail(copy.call, e, parts.clock())
        self._finish(copy, Answer(Wrote()), _IN, size)

    def _read(self, request: ReadChunk, copy: Copy) -> None:
        parts = self._parts
        self._give_credit(copy)
        try:
            parts.engine.end_read(
                copy.call.owner.client_id,
                request.lookup_id,
                request.group,
                request.shard,
                request.chunk,
                request.offset,
                request.length,
                parts.clock(),
            )
        except CacheError as e:
            parts.answers.fail(copy.call, e, parts.clock())
        if copy.target is not None and not copy.ok:
            parts.answers.fail(
                copy.call, UnknownLease("a client of this tenant has cut the chunk's memory"), parts.clock()
            )
        self._finish(copy, Answer(Bytes(), large=copy.target), _OUT, request.length)

    def _give_credit(self, copy: Copy) -> None:
        copy.call.owner.copies -= 1
        copy.call.owner.copied_bytes -= copy.size
        self.running -= 1

    def _finish(self, copy: Copy, answer: Answer, series: str, size: int) -> None:
        """Answer what was copied. What was not had ended before: it was late, or its client is gone."""
        if copy.ok:
            self._parts.numbers.add(series, size)
            self._parts.answers.finish(copy.call, answer, self._parts.clock())


def most_frames(limits: LimitConfig) -> int:
    """Return how many bulk frames one client may have under way if they are small."""
    return max(limits.bulk_window, min(_MOST_FRAMES, limits.in_flight // _FRAMES_SHARE))
