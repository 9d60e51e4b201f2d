# SPDX-License-Identifier: Apache-2.0
"""Which pool is looked at next: equal names merge, failures back off, bursts become one pass.

`Schedule` decides and knows no clock; `Queue` runs it on an event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

__all__ = ["Need", "Outcome", "Queue", "Schedule"]

K = TypeVar("K", bound=Hashable)

_FIRST_RETRY_S: Final = 0.2
_LAST_RETRY_S: Final = 300.0


class Need(Enum):
    """How soon a pass is wanted."""

    NOW = "now"
    """The key's own spec changed: a failure before it does not count any more."""
    SOON = "soon"
    """Something may have to be repaired."""
    SOMETIME = "sometime"
    """There is something to report; during a rollout that is so many times a second."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one pass over a key ended."""

    failed: bool = False
    after_s: float | None = None
    """Look again after this; None: only when something happens."""
    forget: bool = False
    """The key's object is gone."""


@dataclass(slots=True)
class _Entry:
    due_s: float | None = None
    """When to look; None if nothing asks for it."""
    asked_s: float = 0.0
    """When somebody first asked for the coming pass."""
    gap_s: float = 0.0
    """Least time since the last pass for those who asked."""
    running: bool = False
    failures: int = 0
    ended_s: float = float("-inf")


class Schedule(Generic[K]):
    """Due times of keys. Not thread-safe.

    Args:
        gap_s: least time between two passes over one key, so that a burst of events costs one.
        report_gap_s: the same where there is only something to report.
        parallel: passes at a time.
        jitter: a random number in [0, 1) at each call.
    """

    def __init__(self, *, gap_s: float, report_gap_s: float, parallel: int, jitter: Callable[[], float]) -> None:
        self._gap_s = gap_s
        self._report_gap_s = max(gap_s, report_gap_s)
        self._parallel = parallel
        self._jitter = jitter
        self._entries: dict[K, _Entry] = {}

    def add(self, key: K, now_s: float, need: Need = Need.SOON) -> None:
        """Ask for a pass over *key*. A key that failed waits its time out, unless it is needed now."""
        entry = self._entries.setdefault(key, _Entry())
        if need is Need.NOW:
            entry.failures = 0
        gap_s = self._report_gap_s if need is Need.SOMETIME else self._gap_s
        wanted = max(now_s, entry.ended_s + gap_s)
        if entry.due_s is None:
            entry.due_s, entry.asked_s, entry.gap_s = wanted, now_s, gap_s
        elif not entry.failures:
            entry.gap_s = min(entry.gap_s, gap_s)
            entry.asked_s = min(entry.asked_s, now_s) if entry.due_s <= now_s else now_s
            entry.due_s = min(entry.due_s, wanted)

    def take(self, now_s: float) -> K | None:
        """The key to look at now, marked as running; None if none is due or enough are running."""
        if sum(e.running for e in self._entries.values()) >= self._parallel:
            return None
        ready = [(e.due_s, k) for k, e in self._entries.items() if not e.running and _due(e, now_s)]
        if not ready:
            return None
        key = min(ready, key=lambda pair: pair[0] or 0.0)[1]
        entry = self._entries[key]
        entry.running, entry.due_s = True, None
        return key

    def done(self, key: K, now_s: float, outcome: Outcome) -> None:
        """Say how the pass over *key* ended. What was asked for meanwhile is not forgotten."""
        entry = self._entries[key]
        entry.running, entry.ended_s = False, now_s
        entry.failures = entry.failures + 1 if outcome.failed else 0
        asked_again = entry.due_s is not None
        if outcome.failed:
            entry.due_s = now_s + max(outcome.after_s or 0.0, self._backoff_s(entry.failures))
        elif asked_again:
            entry.due_s = now_s + entry.gap_s
            if outcome.after_s is not None:
                entry.due_s = min(entry.due_s, now_s + max(outcome.after_s, self._gap_s))
        elif outcome.forget:
            del self._entries[key]
        elif outcome.after_s is not None:
            entry.due_s = now_s + max(outcome.after_s, self._gap_s)
        if entry.due_s is not None and not asked_again:
            entry.asked_s = entry.due_s

    def next_due_s(self) -> float | None:
        """When a key is due that is not running; None if none will be."""
        due = [e.due_s for e in self._entries.values() if e.due_s is not None and not e.running]
        return min(due, default=None)

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the key that waits longest has been overdue; 0 if none is."""
        return max((now_s - e.asked_s for e in self._entries.values() if not e.running and _due(e, now_s)), default=0.0)

    def due(self, now_s: float) -> int:
        """How many keys wait for a free worker."""
        return sum(not e.running and _due(e, now_s) for e in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def _backoff_s(self, failures: int) -> float:
        """Doubles from a fifth of a second to five minutes, up to a quarter of it cut off at random."""
        full = min(_LAST_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(failures - 1, 30))
        return full * (1 - self._jitter() / 4)


def _due(entry: _Entry, now_s: float) -> bool:
    return entry.due_s is not None and entry.due_s <= now_s


class Queue(Generic[K]):
    """Runs *work* for keys as *schedule* says. Everything on one event loop; *work* never raises."""

    def __init__(
        self, schedule: Schedule[K], work: Callable[[K], Awaitable[Outcome]], clock: Callable[[], float]
    ) -> None:
        self._schedule = schedule
        self._work = work
        self._clock = clock
        self._wake = asyncio.Event()

    def add(self, key: K, need: Need = Need.SOON) -> None:
        """Ask for a pass over *key*."""
        self._schedule.add(key, self._clock(), need)
        self._wake.set()

    def add_all(self, keys: Iterable[K]) -> None:
        """Ask for a pass over each of *keys*."""
        for key in keys:
            self.add(key)

    def oldest_wait_s(self) -> float:
        """See `Schedule.oldest_wait_s`; what liveness is judged by."""
        return self._schedule.oldest_wait_s(self._clock())

    def depth(self) -> tuple[int, int]:
        """How many keys are known, and how many of them wait for a free worker."""
        return len(self._schedule), self._schedule.due(self._clock())

    async def run(self) -> None:
        """Work until cancelled; passes under way are then cancelled, too."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                while (key := self._schedule.take(self._clock())) is not None:
                    tasks.create_task(self._pass(key))
                await self._rest()

    async def _pass(self, key: K) -> None:
        outcome = await self._work(key)
        self._schedule.done(key, self._clock(), outcome)
        self._wake.set()

    async def _rest(self) -> None:
        due_s = self._schedule.next_due_s()
        patience_s = None if due_s is None else max(0.0, due_s - self._clock())
        if patience_s == 0.0 and due_s is not None:  # due, but enough are running: the next end wakes us
            patience_s = None
        try:
            async with asyncio.timeout(patience_s):
                await self._wake.wait()
        except TimeoutError:
            return
