# SPDX-License-Identifier: Apache-2.0
"""Threads that copy streamed bytes between frames and slots, so that the loop never copies anything large.

Each client belongs to one lane, so its copies end in the order in which they began. A lane touches nothing but the two
buffers of its copy; the loop, which handed them out, keeps both valid until it is told that the copy has ended.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import numpy as np

from kvpool.server.calls import Buffer, Call

__all__ = ["Copy", "LaneDiedError", "Lanes"]

_STALLED_S: Final = 5.0
"""A copy of one frame takes about a millisecond."""


class LaneDiedError(RuntimeError):
    """A lane's thread ended although nobody stopped it: the server cannot go on."""


@dataclass(slots=True, eq=False)
class Copy:
    """One piece of a chunk between a frame and a slot."""

    call: Call
    """Whose piece it is; once that has ended, nobody waits for the bytes and they are not copied."""

    source: Buffer | Callable[[], bytes]
    """A frame, or what reads a slot."""

    target: Buffer | None
    """A slot; None if the source reads one: its bytes then belong to the reply."""

    size: int
    """Bytes to be copied."""

    done: Callable[["Copy"], None]
    """Called on the loop once the copy has ended, exactly once."""

    ok: bool = False
    """True if all bytes were copied."""

    def run(self) -> None:
        """Copy; the interpreter lock is free meanwhile."""
        if self.call.ended:
            return
        if callable(self.source):
            self.target = self.source()
            self.ok = len(self.target) == self.size
        elif self.target is not None:
            np.copyto(np.frombuffer(self.target, dtype=np.uint8), np.frombuffer(self.source, dtype=np.uint8))
            self.ok = True


class _Lane:
    """One thread and its queue."""

    def __init__(self, name: str, post: Callable[[Callable[[], object]], None], clock: Callable[[], float]) -> None:
        self._queue: SimpleQueue[Copy | None] = SimpleQueue()
        self._post = post
        self._clock = clock
        self._closing = False
        self.began_s: float | None = None
        """When the copy under way began; None while there is none."""

        self.clients = 0
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)

    def submit(self, copy: Copy) -> None:
        self._queue.put(copy)

    def close(self) -> None:
        self._closing = True
        self._queue.put(None)

    def died(self) -> bool:
        return not self._closing and not self.thread.is_alive()

    def _work(self) -> None:
        try:
            while (copy := self._queue.get()) is not None:
                self.began_s = self._clock()
                copy.run()
                self.began_s = None
                self._post(_Ended(copy))
        finally:
            # Also when it dies: the loop looks at its lanes, now rather than later.
            self._post(_nothing)


class _Ended:
    """Tells the loop that a copy has ended."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy

    def __call__(self) -> None:
        self._copy.done(self._copy)


def _nothing() -> None:
    """Wakes the loop."""


class Lanes:
    """All lanes. Thread: the loop's, for every method.

    Args:
        count: how many threads.
        post: runs a callable on the loop; called from the lanes.
        clock: monotonic seconds.
    """

    def __init__(self, count: int, post: Callable[[Callable[[], object]], None], clock: Callable[[], float]) -> None:
        self._lanes = [_Lane(f"lane-{i}", post, clock) for i in range(count)]

    def start(self) -> None:
        """Start the threads."""
        for lane in self._lanes:
            lane.thread.start()

    def join(self) -> int:
        """Return the lane with the fewest clients and count one more for it."""
        lane = min(range(len(self._lanes)), key=lambda i: self._lanes[i].clients)
        self._lanes[lane].clients += 1
        return lane

    def leave(self, lane: int) -> None:
        """Count one client less."""
        self._lanes[lane].clients -= 1

    def submit(self, lane: int, copy: Copy) -> None:
        """Run *copy* after those that the lane has already."""
        self._lanes[lane].submit(copy)

    def check(self, now_s: float) -> bool:
        """Return False while a copy takes far too long (the machine swaps, or its memory is failing).

        Raises:
            LaneDiedError: a thread ended.
        """
        if any(lane.died() for lane in self._lanes):
            raise LaneDiedError("a lane's thread ended; see its traceback")
        began = [lane.began_s for lane in self._lanes]
        return not any(b is not None and now_s - b > _STALLED_S for b in began)

    def close(self, timeout_s: float) -> bool:
        """Let the lanes finish what they have and end; returns whether all did within *timeout_s* each. Idempotent."""
        for lane in self._lanes:
            lane.close()
        for lane in self._lanes:
            if lane.thread.ident is not None:
                lane.thread.join(timeout_s)
        return not any(lane.thread.is_alive() for lane in self._lanes)
