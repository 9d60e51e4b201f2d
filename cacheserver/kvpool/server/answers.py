# SPDX-License-Identifier: Apache-2.0
"""Every request ends here, exactly once: by its answer, an error, its deadline, or the loss of its client."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Final, Protocol

import structlog

from kvpool.metrics.catalogue import series_key
from kvpool.metrics.numbers import Numbers
from kvpool.model.errors import BY_CODE, CacheError, DeadlineExceeded, Refused, Retryable
from kvpool.server.calls import Answer, Buffer, Call, Client
from kvpool.server.sockets import Peer, Sent, Unread
from kvpool.wire import codec
from kvpool.wire.messages import Failed, Reply, ReplyEnvelope
from kvpool.wire.versions import VERSION_MAX

__all__ = ["Answers", "Sender"]

_OK: Final = "ok"


class Sender(Protocol):
    """The part of the frontend that is needed here; see ``kvpool.server.sockets.Frontend``."""

    def send(self, peer: Peer, frames: list[Buffer]) -> Sent:
        """Send one message; never blocks."""

    def send_large(self, peer: Peer, frames: list[Buffer], large: Buffer) -> Sent | Unread:
        """Send one message with a large last frame; never blocks."""


class Answers:
    """Sends answers, keeps what waits, counts both. Thread: the loop's."""

    def __init__(self, sender: Sender, boot_id: bytes, numbers: Numbers, on_full: Callable[[Client], None]) -> None:
        self._sender = sender
        self._boot_id = boot_id
        self._numbers = numbers
        self._on_full = on_full
        self.follow_log()
        self._deadlines: list[tuple[float, int, Call]] = []
        self._sequence = count()
        self.waiting = 0
        """Requests that wait for something."""

    def follow_log(self) -> None:
        """Write by the level that the log has now; bound once, since a line for each request must cost nothing."""
        self._log = structlog.get_logger().bind()

    def hold(self, call: Call) -> None:
        """Keep *call* open: somebody will finish it, or its deadline will."""
        call.owner.open.add(call)
        self.waiting += 1
        heapq.heappush(self._deadlines, (call.deadline_s, next(self._sequence), call))

    def finish(self, call: Call, answer: Answer, now_s: float) -> None:
        """End *call* with *answer*; nothing happens if it has ended before."""
        if call.ended:
            return
        self._end(call)
        self._count(call, answer.reply, now_s)
        self._send(call, answer)

    def fail(self, call: Call, error: CacheError, now_s: float) -> None:
        """End *call* with *error*; nothing happens if it has ended before."""
        self.finish(call, Answer(codec.encode_failure(error)), now_s)

    def abandon(self, client: Client) -> None:
        """End everything that waits for *client*: nobody is there to read the answers."""
        for call in list(client.open):
            self._end(call)

    def fail_all(self, error: CacheError, now_s: float) -> None:
        """End everything that waits with *error*."""
        for _, _, call in self._deadlines:
            self.fail(call, error, now_s)
        self._deadlines.clear()

    def expire(self, now_s: float) -> None:
        """Answer what waited for too long."""
        while self._deadlines and (self._deadlines[0][0] <= now_s or self._deadlines[0][2].ended):
            call = heapq.heappop(self._deadlines)[2]
            self.fail(call, DeadlineExceeded(f"no answer within {call.deadline_s - call.received_s:.3f} s"), now_s)

    def next_deadline_s(self) -> float | None:
        """Return when the next waiting request must be answered."""
        while self._deadlines and self._deadlines[0][2].ended:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _end(self, call: Call) -> None:
        call.ended = True
        if call.client is not None and call in call.client.open:
            call.client.open.discard(call)
            self.waiting -= 1

    def _send(self, call: Call, answer: Answer) -> None:
        envelope = ReplyEnvelope(VERSION_MAX, call.number, self._boot_id)
        frames: list[Buffer] = [*codec.encode_reply(envelope, answer.reply), *answer.frames]
        if answer.large is None:
            sent: Sent | Unread = self._sender.send(call.peer, frames)
        else:
            sent = self._sender.send_large(call.peer, frames, answer.large)
        if isinstance(sent, Unread):
            if call.client is not None:
                call.client.unread.append(sent)
        elif sent is Sent.FULL and call.client is not None:
            self._on_full(call.client)

    def _count(self, call: Call, reply: Reply, now_s: float) -> None:
        result = _OK
        if isinstance(reply, Failed):
            result = _result_of(reply.code)
            self._numbers.add(series_key("kvpool_errors_total", code=reply.code))
        self._numbers.add(_REQUESTS(call.tag, result))
        client = call.client.client_id.hex()[:8] if call.client else ""
        took_us = round((now_s - call.received_s) * 1e6)
        self._log.debug("request.served", request=call.tag, result=result, client=client, took_us=took_us)


class _Keys(dict[tuple[str, str], str]):
    """Series keys by (tag, result), made once each: a request should not pay for formatting text."""

    def __missing__(self, pair: tuple[str, str]) -> str:
        key = self[pair] = series_key("kvpool_requests_total", request=pair[0], result=pair[1])
        return key

    def __call__(self, tag: str, result: str) -> str:
        return self[tag, result]


_REQUESTS: Final = _Keys()


def _result_of(code: str) -> str:
    cls = BY_CODE.get(code, CacheError)
    if issubclass(cls, Retryable):
        return "retryable"
    return "refused" if issubclass(cls, Refused) else "internal"
