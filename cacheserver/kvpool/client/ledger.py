# SPDX-License-Identifier: Apache-2.0
"""Which requests have transfers under way, and which have ended since somebody asked; plus counts."""

import threading
from collections import Counter

from kvpool.client.jobs import Finished

__all__ = ["Ledger"]


class Ledger:
    """Counts jobs, not futures: a request is done when its last job is, however many there were. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._stores: Counter[str] = Counter()
        self._reading: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._stored: set[str] = set()
        self._loaded: dict[str, frozenset[int]] = {}
        self._counts: Counter[str] = Counter()

    def begin_store(self, request_id: str) -> None:
        """A store of the request begins."""
        with self._lock:
            self._stores[request_id] += 1
            self._reading[request_id] += 1

    def end_reading(self, request_id: str) -> None:
        """A store of the request reads no blocks any more; exactly once for each that began, before its end."""
        with self._lock:
            self._down(self._reading, request_id)

    def end_store(self, request_id: str) -> None:
        """A store of the request ended; exactly once for each that began."""
        with self._lock:
            self._down(self._stores, request_id)
            self._stored.add(request_id)
            self._lock.notify_all()

    def begin_load(self, request_id: str) -> None:
        """A load of the request begins."""
        with self._lock:
            self._loads[request_id] += 1

    def end_load(self, request_id: str, bad_blocks: frozenset[int]) -> None:
        """A load of the request ended; exactly once for each that began."""
        with self._lock:
            self._down(self._loads, request_id)
            self._loaded[request_id] = self._loaded.get(request_id, frozenset()) | bad_blocks
            self._lock.notify_all()

    def has_stores(self, request_id: str) -> bool:
        """True while a store of the request may read blocks."""
        with self._lock:
            return request_id in self._reading

    def wait_over(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; returns whether it is so."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._stores and not self._loads, timeout_s)

    def take(self, timeout_s: float = 0.0) -> Finished:
        """Return the requests that have nothing left of a kind, each end once; waits for at least one, if told so."""
        with self._lock:
            if timeout_s:
                self._lock.wait_for(self._has_ended, timeout_s)
            stored = frozenset(r for r in self._stored if r not in self._stores)
            self._stored -= stored
            loaded = {r: bad for r, bad in self._loaded.items() if r not in self._loads}
            for request_id in loaded:
                del self._loaded[request_id]
        return Finished(stored, loaded)

    def _has_ended(self) -> bool:
        return not (self._stores.keys() >= self._stored and self._loads.keys() >= self._loaded.keys())

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += amount  # type: ignore[assignment]

    def counts(self) -> dict[str, float]:
        """Return all counters that were ever added to."""
        with self._lock:
            return {name: float(value) for name, value in self._counts.items()}

    @staticmethod
    def _down(counter: Counter[str], request_id: str) -> None:
        assert counter[request_id] > 0, "a job ended twice"
        counter[request_id] -= 1
        if not counter[request_id]:
            del counter[request_id]
