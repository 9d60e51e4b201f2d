# SPDX-License-Identifier: Apache-2.0
"""A transfer thread with a bounded queue: it takes the first work that can go on, so none waits for another's event.

While none can, the thread prepares what waits. Work may leave moves under way: the next work then begins at once if it
can go on, else the thread waits for the moves.
"""

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final, Generic, Protocol, TypeVar

from kvpool.client.supervise import attempt

__all__ = ["Lane", "Work"]


class Work(Protocol):
    """Something that a lane runs once."""

    def due_in_s(self, now_s: float) -> float:
        """Return how long the lane may look elsewhere; 0 once ``run`` has something to do, if only to give up."""

    def can_prepare(self) -> bool:
        """Return whether ``prepare`` has something to do now."""

    def prepare(self) -> None:
        """Do what need not wait until it is due, on the lane's thread, which has nothing else to do; once."""

    def run(self) -> None:
        """Do it, on the lane's thread. Raises nothing and ends by its own deadline."""

    def settle(self) -> None:
        """Wait for what ``run`` left under way; once, else as ``run``."""


W = TypeVar("W", bound=Work)

_UNDER_WAY: Final = 1
"""Works whose moves may still be under way while the next one is run."""


class Lane(Generic[W]):
    """One thread and what waits for it. Any thread may call."""

    def __init__(self, name: str, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: deque[W] = deque()
        self._prepared: list[W] = []
        """Those of the queue for which something was done."""
        self._running: deque[W] = deque()
        """What is run or to be settled."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, work: W) -> bool:
        """Queue *work*; False if the queue is full or the lane closed."""
        with self._changed:
            if self._closing or len(self._queue) >= self._limit:
                return False
            self._queue.append(work)
            self._changed.notify()
        return True

    def kick(self) -> None:
        """Look at the queue again: something that work waits for may have come. Wakes nobody if the queue is empty."""
        with self._changed:
            if self._queue:
                self._changed.notify()

    def withdraw(self, which: Callable[[W], bool]) -> tuple[list[W], list[W]]:
        """Take work out for which nothing was done yet; returns it, and what is such of the other, which goes on."""
        with self._changed:
            taken, kept = list[W](), deque[W]()
            for work in self._queue:
                (taken if which(work) and work not in self._prepared else kept).append(work)
            self._queue = kept
            others = [w for w in [*self._running, *self._prepared] if which(w)]
        return taken, others

    def close(self) -> list[W]:
        """Take no more work; returns what will not be run. Idempotent, does not wait."""
        with self._changed:
            self._closing = True
            left, self._queue, self._prepared = [*self._queue], deque(), []
            self._changed.notify()
        return left

    def join(self, timeout_s: float) -> bool:
        """Wait for the running work of a closed lane; returns whether it ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Run the next work, or settle what was run; False if there will be nothing of both any more."""
        work = self._next(wait=not self._running)
        if work is not None:
            attempt("a transfer", work.run)
        elif not self._running:
            return False
        if work is None or len(self._running) > _UNDER_WAY:
            self._settle()
        return True

    def _settle(self) -> None:
        """Wait for the oldest of the running works."""
        attempt("the end of a transfer", self._running[0].settle)
        with self._changed:
            self._running.popleft()

    def _next(self, *, wait: bool) -> W | None:
        """Return work that is due; None if the lane closes, or if there is none and it is not to be waited for."""
        while True:
            with self._changed:
                work, soonest_s = (None, None) if self._closing else self._due()
                if work is not None or self._closing or not wait:
                    return work
                early = next((w for w in self._queue if w.can_prepare()), None)
                if early is None:
                    self._changed.wait(soonest_s)
                else:
                    self._prepared.append(early)
            if early is not None:
                attempt("the preparation of a transfer", early.prepare)

    def _due(self) -> tuple[W | None, float | None]:
        """Take work that is due out of the queue, or return when some will be."""
        now_s = monotonic()
        soonest_s: float | None = None
        for work in self._queue:
            if (due_s := work.due_in_s(now_s)) <= 0:
                self._queue.remove(work)
                self._prepared = [w for w in self._prepared if w is not work]
                self._running.append(work)
                return work, None
            soonest_s = due_s if soonest_s is None else min(soonest_s, due_s)
        return None, soonest_s
