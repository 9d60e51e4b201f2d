# SPDX-License-Identifier: Apache-2.0
"""A small future for one request."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from kvpool.model.errors import CacheError
from kvpool.wire.messages import Reply, Request

__all__ = ["Call", "Frame"]

Frame = bytes | bytearray | memoryview

R = TypeVar("R", bound=Reply)

_SENT: Final = 0
_END: Final = 1


class Call(Generic[R]):
    """One request under way. The Link ends it exactly once: by a reply, an error, or its deadline.

    Any thread may look at it.
    """

    def __init__(self, request: Request[Any], frames: Sequence[Frame], deadline_s: float) -> None:
        self.request = request
        self.frames = frames
        self.deadline_s = deadline_s
        """When the call ends at the latest, on the monotonic clock."""
        self._ended = False
        # A lock that is held until the end costs a fraction of what an Event does, and there is one for each request.
        self._running = threading.Lock()
        self._running.acquire()
        self._reply: R | None = None
        self._reply_frames: Sequence[Frame] = ()
        self._error: CacheError | None = None
        self.sent = False
        """True once the request is on its way."""
        self._steps: list[Callable[[], None] | None] = [None, None]
        """What is to be called, once it was sent and at its end."""
        self._telling = threading.Lock()

    def done(self) -> bool:
        """True once the call has ended."""
        return self._ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; returns whether it came."""
        if not self._ended and self._running.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._running.release()
        return self._ended

    def result(self) -> tuple[R, Sequence[Frame]]:
        """Return the reply and its raw frames, waiting for the end.

        Raises:
            CacheError: the call failed; the class says what can be done about it.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply, self._reply_frames

    def error(self) -> CacheError | None:
        """Return why the call failed, or None if it has not (yet)."""
        return self._error

    def then(self, step: Callable[[], None]) -> None:
        """Call *step* once: at the end, from the Link's thread, or now, from this one, if that is over. One a call."""
        self._steps[_END] = step
        if self.done():
            self._tell(_END)

    def when_sent(self, step: Callable[[], None]) -> None:
        """As ``then``, once the request is on its way; never if it ends before that."""
        self._steps[_SENT] = step
        if self.sent:
            self._tell(_SENT)

    def note_sent(self) -> None:
        """Learn that the request is on its way; the Link alone calls this."""
        self.sent = True
        self._tell(_SENT)

    def finish(self, reply: R, frames: Sequence[Frame]) -> None:
        """End the call with a reply; the Link alone calls this."""
        if not self._ended:
            self._reply, self._reply_frames = reply, frames
            self._end()

    def fail(self, error: CacheError) -> None:
        """End the call with an error; the Link alone calls this."""
        if not self._ended:
            self._error = error
            self._end()

    def _end(self) -> None:
        self.frames = ()
        self._ended = True
        self._running.release()
        self._tell(_END)

    def _tell(self, when: int) -> None:
        """Whichever thread comes first calls the step; the other one finds none."""
        with self._telling:
            step, self._steps[when] = self._steps[when], None
        if step is not None:
            step()
