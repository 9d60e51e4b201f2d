# SPDX-License-Identifier: Apache-2.0
"""How other threads reach the request loop: they leave a callable and wake it; they never touch its state."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from kvpool.model.errors import DeadlineExceeded, Draining

__all__ = ["Inbox"]

T = TypeVar("T")

_SHUT: Final = "the server is shutting down"


class _Question(Generic[T]):
    """One callable with the place for its result; the asker waits, the loop fills it."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._done = threading.Event()
        self._result: T | None = None
        self._error: Exception | None = None

    def __call__(self) -> None:
        """Run on the loop; what it raises goes back to the asker, whose question it was."""
        try:
            self._result = self._ask()
        except Exception as e:  # noqa: BLE001 - it is raised again in the thread that asked
            self._error = e
        self._done.set()

    def refuse(self, error: Exception) -> None:
        """End without having run."""
        self._error = error
        self._done.set()

    def wait(self, deadline_s: float) -> T:
        """Return the result, or raise what the callable raised, or DeadlineExceeded."""
        if not self._done.wait(deadline_s):
            raise DeadlineExceeded(f"the request loop did not answer within {deadline_s} s")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set whenever no error is


class Inbox:
    """Callables that the loop runs between two requests, in the order they came.

    Threads: ``post`` and ``ask`` from any thread but ``ask`` never from the loop itself; ``take`` on the loop alone.
    """

    def __init__(self) -> None:
        self._items: deque[Callable[[], object]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._shut = False

    def fileno(self) -> int:
        """Readable whenever something may have been posted."""
        return self._wake

    def post(self, item: Callable[[], object]) -> None:
        """Have *item* run on the loop soon; what it raises ends the server. Safe in a signal handler."""
        self._items.append(item)
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def ask(self, question: Callable[[], T], deadline_s: float) -> T:
        """Run *question* on the loop and return its result.

        Raises:
            DeadlineExceeded: the loop did not run it in time; it may still run later.
            Draining: the loop has ended.
            Exception: what *question* raised.
        """
        asked = _Question(question)
        self.post(asked)
        if self._shut:
            raise Draining(_SHUT)
        return asked.wait(deadline_s)

    def take(self) -> list[Callable[[], object]]:
        """Return what was posted since the last call."""
        if self._wake >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return [self._items.popleft() for _ in range(len(self._items))]

    def shut(self) -> None:
        """The loop has ended: refuse the questions that wait and all later ones; nothing runs any more."""
        self._shut = True
        for item in self.take():
            if isinstance(item, _Question):
                item.refuse(Draining(_SHUT))

    def close(self) -> None:
        """Release the wake-up, once no other thread uses this inbox. Idempotent."""
        self.shut()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
