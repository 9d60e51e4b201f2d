# SPDX-License-Identifier: Apache-2.0
"""A transfer thread with a bounded queue: it takes the first work that can go on, so none waits for another's event."""

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Generic, Protocol, TypeVar

from kvpool.client.supervise import attempt

__all__ = ["Lane", "Work"]


class Work(Protocol):
    """Something that a lane runs once."""

    def due_in_s(self, now_s: float) -> float:
        """Return how long the lane may look elsewhere; 0 once ``run`` has something to do, if only to give up."""

    def run(self) -> None:
        """Do it, on the lane's thread. Raises nothing and ends by its own deadline."""


W = TypeVar("W", bound=Work)


class Lane(Generic[W]):
    """One thread and what waits for it. Any thread may call."""

    def __init__(self, name: str, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: deque[W] = deque()
        self._current: W | None = None
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
        """Look at the queue again: something that work waits for may have come."""
        with self._changed:
            self._changed.notify()

    def withdraw(self, which: Callable[[W], bool]) -> tuple[list[W], W | None]:
        """Take queued work out; returns it, and the running work if it is such, which goes on."""
        with self._changed:
            taken = [w for w in self._queue if which(w)]
            self._queue = deque(w for w in self._queue if not which(w))
            current = self._current
        return taken, current if current is not None and which(current) else None

    def close(self) -> list[W]:
        """Take no more work; returns what will not be run. Idempotent, does not wait."""
        with self._changed:
            self._closing = True
            left, self._queue = [*self._queue], deque()
            self._changed.notify()
        return left

    def join(self, timeout_s: float) -> bool:
        """Wait for the running work of a closed lane; returns whether it ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            attempt("a transfer", work.run)
            with self._changed:
                self._current = None
            # Not kept alive until the next one comes: it may hold a request's frames.
            del work

    def _next(self) -> W | None:
        with self._changed:
            while not self._closing:
                now_s = monotonic()
                soonest_s: float | None = None
                for work in self._queue:
                    if (due_s := work.due_in_s(now_s)) <= 0:
                        self._queue.remove(work)
                        self._current = work
                        return work
                    soonest_s = due_s if soonest_s is None else min(soonest_s, due_s)
                self._changed.wait(soonest_s)
            return None
