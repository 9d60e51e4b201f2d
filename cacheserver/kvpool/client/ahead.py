# SPDX-License-Identifier: Apache-2.0
"""A job's last request, sent while a mover is still at its bytes."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvpool.client.call import Call
from kvpool.wire.messages import Reply

__all__ = ["Ahead"]

R = TypeVar("R", bound=Reply)


class Ahead(Generic[R]):
    """Sent once at most, and not any more once the bytes are over: the end of a job may come on another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: Call[R] | None = None
        self._over = False

    def send(self, commit: Callable[[], Call[R]]) -> None:
        """Send it with *commit*, unless the bytes are over."""
        with self._lock:
            if not self._over:
                self._call = commit()

    def take(self) -> Call[R] | None:
        """Learn that the bytes are over; returns what was sent before."""
        with self._lock:
            self._over = True
            return self._call
