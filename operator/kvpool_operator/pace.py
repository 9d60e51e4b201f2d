# SPDX-License-Identifier: Apache-2.0
"""Pure: when the status of a pool is written. What flips is said at once; what only counts on, ever more seldom."""

from dataclasses import dataclass
from typing import Final

from kvpool_operator.spec import Condition, PoolStatus

__all__ = ["Pace", "flips", "news", "stories", "tally"]

_LONGEST_S: Final = 120.0
_GROWTH: Final = 3.0
_SOONER: Final = 4.0
_SUMMED_UP: Final = frozenset({"ConfigValid", "Available", "Progressing"})
"""Conditions that Ready is made of."""


@dataclass(slots=True)
class Pace:
    """The writes of one pool's status.

    Each write that only brings numbers up to date triples the gap to the next one, up to two minutes; a write that says
    something new, or a rest with nothing to say, sets it back. So a rollout over a thousand nodes costs a handful of
    writes. What has counted to its end is written in a quarter of that time.

    Args:
        gap_s: least time between two writes.
    """

    gap_s: float
    _written_s: float = float("-inf")
    _now_gap_s: float = 0.0
    _tally: object = None
    _steady_s: float = 0.0
    """Since when the tally is what it is."""

    def due(self, now_s: float, *, new: bool, final: bool = False) -> bool:
        """True if the status may be written now; *new* if it says more than new numbers, *final* if they stay."""
        grown_s = self._now_gap_s / _SOONER if final else self._now_gap_s
        return now_s - self._written_s >= (self.gap_s if new else max(self.gap_s, grown_s))

    def steady(self, now_s: float, counted: object) -> bool:
        """True if what was *counted* has been the same for the least gap."""
        if counted != self._tally:
            self._tally, self._steady_s = counted, now_s
        return now_s - self._steady_s >= self.gap_s

    def rest(self, now_s: float) -> None:
        """No rollout goes on, and there is nothing to write."""
        if now_s - self._written_s > 2 * max(self.gap_s, self._now_gap_s):
            self._now_gap_s = 0.0

    def written(self, now_s: float, *, new: bool) -> None:
        """It was."""
        grown_s = min(_LONGEST_S, _GROWTH * max(self.gap_s, self._now_gap_s))
        self._now_gap_s = _GROWTH * self.gap_s if new else grown_s
        self._written_s = now_s


def flips(before: PoolStatus, made: PoolStatus) -> tuple[Condition, ...]:
    """Conditions whose status is not what it was. What was never said before did not flip."""
    former = {c.type: c.status for c in before.conditions}
    return tuple(c for c in made.conditions if former.get(c.type, c.status) != c.status)


def stories(flipped: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """Those of *flipped* that deserve an Event: what Ready says already is not said again."""
    ready = next((c for c in flipped if c.type == "Ready"), None)
    return tuple(c for c in flipped if ready is None or c is ready or not _told_by(ready, c))


def _told_by(ready: Condition, other: Condition) -> bool:
    same = (other.reason, other.message) == (ready.reason, ready.message)
    return other.type in _SUMMED_UP and (ready.status == "True" or same)


def news(before: PoolStatus, made: PoolStatus) -> bool:
    """True if *made* says more than other numbers: another spec was seen, or a condition flipped or is new."""
    if before.observed_generation != made.observed_generation or len(before.conditions) != len(made.conditions):
        return True
    return bool(flips(before, made))


def tally(made: PoolStatus) -> tuple[object, ...] | None:
    """What of *made* comes to an end when pods stop changing; None while a rollout goes on. Traffic never does."""
    said = {c.type: c for c in made.conditions}
    if "Progressing" not in said or said["Progressing"].status == "True":
        return None
    wired = said["ClientsWired"].message if "ClientsWired" in said else ""
    servers = made.servers, made.capacity, made.versions, made.rollout, made.problem_nodes, made.problem_node_count
    return *servers, made.unwired_pods, made.unwired_pod_count, wired
