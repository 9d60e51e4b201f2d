# SPDX-License-Identifier: Apache-2.0
"""Threads that take the arena's memory in the background, after the server is ready.

First every region is reserved (0.11 s/GiB), then cleared and mapped (0.74 s/GiB and more on one core), in small
pieces, so that neither a stop nor a region that is needed at once waits long. A region that is needed earlier is
reserved by whoever formats it.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.arena.segment import Segment
from kvpool.model.errors import PoolFull

__all__ = ["Growth"]

_RESERVE_PIECE: Final = 8 << 20
_TOUCH_PIECE: Final = 1 << 20
"""About a millisecond each, for which a region that is needed at once may have to wait."""

_NICE: Final = 10
"""Above the process's own: who waits for an answer goes first. Not the most: a piece must not take for ever."""


class Growth:
    """A fixed number of threads over the segments; ``stop`` ends and joins them. Any thread may ask."""

    def __init__(self, segments: Sequence[Segment], threads: int) -> None:
        self._stop = threading.Event()
        self._failure = ""
        self._threads = [
            threading.Thread(target=self._run, args=(segments[i::threads],), name=f"arena-growth-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> bool:
        """True while a thread is at work."""
        return any(t.is_alive() for t in self._threads)

    @property
    def failure(self) -> str:
        """Why growing ended early; empty if it did not."""
        return self._failure

    def join(self, timeout_s: float) -> bool:
        """Wait until all is grown or growing failed; False if it takes longer than *timeout_s* for a thread."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not self.running

    def stop(self) -> None:
        """End the threads and wait for them: at most for one piece each. Idempotent."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, segments: Sequence[Segment]) -> None:
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
        try:
            for segment in segments:
                self._all(segment.grow, _RESERVE_PIECE)
            for segment in segments:
                self._all(segment.touch, _TOUCH_PIECE)
        except (PoolFull, OSError) as e:
            self._failure = str(e)

    def _all(self, step: Callable[[int], int], piece: int) -> None:
        while not self._stop.is_set() and step(piece):
            pass
