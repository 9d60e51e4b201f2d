# SPDX-License-Identifier: Apache-2.0
"""Keeps copies and sessions apart: no copy runs with a session's placements after its client said Hello again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvpool.model.errors import StaleBoot

__all__ = ["CopyGate"]


class CopyGate:
    """Counts running copies. The Link opens and shuts it; transfer threads pass through it.

    A Hello tells the server that this client's former writes are over, so the Link shuts the gate, waits until nobody
    is inside, and only then says Hello.
    """

    def __init__(self, on_idle: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._epoch: int | None = None
        self._running = 0
        self._on_idle = on_idle

    @contextmanager
    def copying(self, epoch: int) -> Iterator[None]:
        """Hold the session of *epoch* while one chunk is copied.

        Raises:
            StaleBoot: that session is over.
        """
        with self._lock:
            if self._epoch != epoch:
                raise StaleBoot("the session that this copy belongs to is over")
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                shut_and_idle = self._epoch is None and not self._running
            if shut_and_idle:
                self._on_idle()

    def open(self, epoch: int) -> None:
        """Let copies of *epoch* in, and no others."""
        with self._lock:
            self._epoch = epoch

    def shut(self) -> None:
        """Let no new copy in; running ones go on."""
        with self._lock:
            self._epoch = None

    def idle(self) -> bool:
        """True if no copy runs."""
        with self._lock:
            return not self._running
