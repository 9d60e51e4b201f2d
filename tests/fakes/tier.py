# SPDX-License-Identifier: Apache-2.0
"""FakeTier: a tier in memory whose fetches end when the test says so."""

from collections.abc import Callable, Sequence

from kvpool.engine.ports import FetchDone, TierKey
from kvpool.model.checksum import PREFERRED, checksum


class FakeTier:
    """Holds bytes by key. ``finish`` ends fetches; keys in *failing* bring nothing."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.kept: dict[TierKey, bytes] = {}
        self.failing: set[TierKey] = set()
        self.pending: dict[int, tuple[TierKey, memoryview]] = {}
        self._at_once = at_once
        self._done: list[FetchDone] = []
        self._wakes: list[Callable[[], None]] = []

    def holds(self, keys: Sequence[TierKey]) -> list[bool]:
        return [key in self.kept for key in keys]

    def fetch(self, fetch_id: int, key: TierKey, target: memoryview) -> None:
        assert fetch_id not in self.pending
        self.pending[fetch_id] = (key, target)
        if self._at_once:
            self.finish()

    def done(self) -> list[FetchDone]:
        ended, self._done = self._done, []
        return ended

    def on_done(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def finish(self, count: int | None = None) -> int:
        """End the oldest *count* fetches, or all; returns how many."""
        ending = list(self.pending)[:count]
        for fetch_id in ending:
            key, target = self.pending.pop(fetch_id)
            self._done.append(self._bring(fetch_id, key, target))
        for wake in self._wakes if ending else ():
            wake()
        return len(ending)

    def _bring(self, fetch_id: int, key: TierKey, target: memoryview) -> FetchDone:
        data = self.kept.get(key, b"")
        if key in self.failing or not data or len(data) > len(target):
            return FetchDone(fetch_id, 0, bytes(16), 0)
        target[: len(data)] = data
        return FetchDone(fetch_id, len(data), checksum(data), PREFERRED)
