# SPDX-License-Identifier: Apache-2.0
"""How long a thread may sleep before it spins for the end of a copy: most of what the copy will take, by the last ones.

A thread that sleeps all the time is woken 0.1 ms late, which costs a busy ring 5 % of the link; one that spins all the
time costs a core for each direction of each client.
"""

from typing import Final

__all__ = ["Pace"]

_SHARE: Final = 0.6
_LEAST_S: Final = 0.0001
"""Waking up takes as long."""

_WEIGHT: Final = 0.25


class Pace:
    """The speed of one lane's copies, which run one after the other. Times are monotonic seconds. One thread."""

    def __init__(self) -> None:
        self._s_per_byte = 0.0
        self._ended_s = 0.0

    def sleep_s(self, length: int, queued_s: float, now_s: float) -> float:
        """Return how long to sleep before waiting for the next copy's end; 0 for not at all."""
        expected_s = length * self._s_per_byte
        left_s = max(queued_s, self._ended_s) + _SHARE * expected_s - now_s
        return left_s if left_s > _LEAST_S else 0.0

    def ended(self, length: int, queued_s: float, now_s: float) -> None:
        """Learn that a copy ended."""
        rate = (now_s - max(queued_s, self._ended_s)) / length
        # The quickest counts at once: to sleep too long is worse than to spin.
        self._s_per_byte = min(rate, self._s_per_byte + _WEIGHT * (rate - self._s_per_byte)) if self._ended_s else rate
        self._ended_s = now_s
