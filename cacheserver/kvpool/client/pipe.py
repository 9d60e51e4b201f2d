# SPDX-License-Identifier: Apache-2.0
"""Requests and replies over one connection: a window of unanswered requests, a queue behind it, deadlines."""

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any, Final, get_args

from kvpool.client.call import Call, Frame
from kvpool.client.socket import Connection
from kvpool.model.errors import Busy, CacheError, DeadlineExceeded, Malformed, StaleBoot
from kvpool.wire import codec
from kvpool.wire.messages import AnyRequest, Envelope, Failed, ReadChunk, Reply
from kvpool.wire.versions import VERSION_MAX

__all__ = ["Pipe"]

AnyCall = Call[Any]

_REPLY_OF: Final[dict[type, type[Reply]]] = {
    request: get_args(request.__orig_bases__[0])[0] for request in get_args(AnyRequest)
}

_QUEUE_CALLS: Final = 4096

_serials = count(1)
"""Request ids, never used twice in a process: a late reply can end no other call."""


class Pipe:
    """One connection's calls; used by the Link's thread alone.

    A call ends by its deadline whether or not it was sent. One that was sent and got no answer keeps its place in the
    window for *forget_s* more: the server may still be at it, and more frames would only pile up before it.
    """

    def __init__(self, connection: Connection, window: int, forget_s: float) -> None:
        self.connection = connection
        self.window = window
        """Calls that may be unanswered, whatever their size."""
        self.window_bytes = self.most = 0
        """Calls may be more than the window, up to *most*, if together they have no more than these bytes."""
        self.boot_id = b""
        """The server's boot id; empty until the first reply."""
        self._forget_s = forget_s
        self._open: dict[int, AnyCall] = {}
        self._waiting: deque[int] = deque()
        self._in_flight: dict[int, int] = {}
        """Serial to bytes."""
        # Numbers only: a call that ended must not keep its frames alive until its deadline.
        self._timers: list[tuple[float, int]] = []

    def add(self, call: AnyCall) -> None:
        """Queue *call* behind those that wait for the window, or end it if they are too many."""
        if len(self._waiting) >= _QUEUE_CALLS:
            call.fail(Busy(f"{_QUEUE_CALLS} requests wait for the server"))
            return
        self._waiting.append(self._admit(call))

    def send_now(self, call: AnyCall, now_s: float) -> bool:
        """Send *call* whatever the window is; False if ZeroMQ takes nothing (the call then ends by its deadline)."""
        return self._send(self._admit(call), now_s)

    def flush(self, now_s: float) -> None:
        """Send what waits, as far as the window goes."""
        while self._waiting:
            serial = self._waiting[0]
            if serial in self._open and not (self._fits(serial) and self._send(serial, now_s)):
                return
            self._waiting.popleft()

    def replies(self) -> Iterator[CacheError | None]:
        """Take all replies that are there; yields for each the failure that it carried, or None.

        Raises:
            StaleBoot: a reply comes from another run of the server.
        """
        while (frames := self.connection.receive()) is not None:
            try:
                envelope, reply = codec.decode_reply(frames)
            except Malformed:
                continue  # its call ends by its deadline
            if self.boot_id not in (b"", envelope.boot_id):
                raise StaleBoot("the server was restarted")
            self.boot_id = envelope.boot_id
            self._in_flight.pop(envelope.request_id, None)
            call = self._open.pop(envelope.request_id, None)
            yield _settle(call, reply, frames[2:]) if call is not None else None

    def expire(self, now_s: float) -> None:
        """End the calls whose time is up."""
        while self._timers and self._timers[0][0] <= now_s:
            _, serial = heapq.heappop(self._timers)
            if (call := self._open.get(serial)) is None:
                continue
            if not call.done() and serial in self._in_flight:
                heapq.heappush(self._timers, (now_s + self._forget_s, serial))
            else:
                del self._open[serial]
                self._in_flight.pop(serial, None)
            call.fail(DeadlineExceeded(f"no answer to {type(call.request).__name__} in time"))

    def next_deadline_s(self) -> float | None:
        """When ``expire`` has to be called next."""
        return self._timers[0][0] if self._timers else None

    def close(self, error: CacheError) -> None:
        """Drop the connection and end all calls with *error*; idempotent."""
        self.connection.close()
        calls, self._open = self._open, {}
        self._waiting.clear()
        self._in_flight.clear()
        self._timers.clear()
        for call in calls.values():
            call.fail(error)

    def _admit(self, call: AnyCall) -> int:
        serial = next(_serials)
        self._open[serial] = call
        heapq.heappush(self._timers, (call.deadline_s, serial))
        return serial

    def _send(self, serial: int, now_s: float) -> bool:
        call = self._open[serial]
        left_ms = max(0, int((call.deadline_s - now_s) * 1000))
        try:
            head = codec.encode_request(Envelope(VERSION_MAX, serial, left_ms), call.request)
        except (TypeError, ValueError, OverflowError) as e:  # a name with half a surrogate, say: its own call's fault
            del self._open[serial]
            call.fail(Malformed(f"{type(call.request).__name__} cannot be encoded: {e}"))
            return True
        if not self.connection.send([*head, *call.frames]):
            return False
        self._in_flight[serial] = _size(call)
        call.note_sent()
        return True

    def _fits(self, serial: int) -> bool:
        under_way = len(self._in_flight)
        if under_way < self.window:
            return True
        size = _size(self._open[serial])
        return under_way < self.most and sum(self._in_flight.values()) + size <= self.window_bytes


def _size(call: AnyCall) -> int:
    """Return how many bytes a call brings or asks for."""
    if isinstance(call.request, ReadChunk):
        return call.request.length
    return sum(len(frame) for frame in call.frames)


def _settle(call: AnyCall, reply: Reply, frames: list[Frame]) -> CacheError | None:
    """End *call* with what came back; returns the failure, if it is one."""
    if isinstance(reply, Failed):
        error = codec.error_of(reply)
    elif isinstance(reply, _REPLY_OF[type(call.request)]):
        call.finish(reply, frames)
        return None
    else:
        error = Malformed(f"{type(reply).__name__} is no answer to {type(call.request).__name__}")
    call.fail(error)
    return error
