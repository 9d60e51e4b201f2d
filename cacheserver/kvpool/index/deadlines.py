# SPDX-License-Identifier: Apache-2.0
"""Who is due when: a heap of deadlines that may be moved or dropped."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Deadlines"]

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """One deadline a key. Moving one leaves its old heap entry behind, which is skipped when it surfaces."""

    def __init__(self) -> None:
        """Start with none."""
        self._due_s: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._due_s)

    def set(self, key: K, due_s: float) -> None:
        """Give *key* a deadline, in place of its former one."""
        self._due_s[key] = due_s
        self._serial += 1  # keys need not be comparable
        heapq.heappush(self._heap, (due_s, self._serial, key))
        if len(self._heap) > 2 * len(self._due_s) + 64:
            self._rebuild()

    def drop(self, key: K) -> None:
        """Forget a key; it need not be known."""
        self._due_s.pop(key, None)

    def next_s(self) -> float | None:
        """Return the earliest deadline."""
        while self._heap and self._due_s.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_s: float) -> list[K]:
        """Remove and return the keys whose time has come, earliest first."""
        due = []
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            key = heapq.heappop(self._heap)[2]
            del self._due_s[key]
            due.append(key)
        return due

    def _rebuild(self) -> None:
        self._heap = [(due_s, i, key) for i, (key, due_s) in enumerate(self._due_s.items())]
        self._serial = len(self._heap)
        heapq.heapify(self._heap)
