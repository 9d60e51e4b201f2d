# SPDX-License-Identifier: Apache-2.0
"""How long an engine waits for the cache where it must: a small share of its own time, saved up to a bound."""

from typing import Final

__all__ = ["Patience"]

SHARE: Final = 0.05
"""Of the time that passes."""

MOST_S: Final = 1.0


class Patience:
    """A budget of seconds that grows with time. The engine's thread alone uses it."""

    def __init__(self, *, share: float = SHARE, most_s: float = MOST_S) -> None:
        self._share = share
        self._most_s = most_s
        self._saved_s = most_s
        self._seen_s: float | None = None

    def left_s(self, now_s: float) -> float:
        """Return what may be waited now."""
        if self._seen_s is not None:
            self._saved_s = min(self._most_s, self._saved_s + self._share * (now_s - self._seen_s))
        self._seen_s = now_s
        return max(0.0, self._saved_s)

    def spent(self, seconds: float) -> None:
        """Take off what was waited."""
        self._saved_s -= seconds
