# SPDX-License-Identifier: Apache-2.0
"""Whether a load is expected to be quicker than computing, from what both took lately.

    seconds = start + tokens * rate        fitted to the last loads, and to the last steps that computed prompts

Both lines forget: an old sample counts less with each new one. Before there are enough samples of both, every hit is
loaded; and of loads that are not expected to be worth it, some are made all the same, or nobody would notice that the
server is quick again.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Line", "Rates"]

FORGET: Final = 0.9
ENOUGH: Final = 3
TRY_EVERY: Final = 16
PROMPT_TOKENS: Final = 128
"""Steps with fewer tokens do not show how long a prompt takes."""

_QUEUE: Final = 16


@dataclass(slots=True)
class Line:
    """A straight line through samples, the older the lighter."""

    samples: int = 0
    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Take in one sample."""
        self.samples += 1
        self._n = FORGET * self._n + 1
        self._x = FORGET * self._x + tokens
        self._y = FORGET * self._y + seconds
        self._xx = FORGET * self._xx + tokens * tokens
        self._xy = FORGET * self._xy + tokens * seconds

    def seconds(self, tokens: int) -> float:
        """Return how long *tokens* are expected to take; neither the start nor the rate is ever negative."""
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-9 * self._n * self._xx:
            return self._y / self._x * tokens
        rate = (self._n * self._xy - self._x * self._y) / spread
        start = (self._y - rate * self._x) / self._n
        if rate <= 0:
            return self._y / self._n
        return start + rate * tokens if start > 0 else self._xy / self._xx * tokens


@dataclass(slots=True)
class Rates:
    """What loads and computed prompts took. The engine's scheduling thread alone uses it."""

    budget: float
    """A load may be expected to take this times as long as computing; 0 loads everything."""

    loads: Line = field(default_factory=Line)
    prompts: Line = field(default_factory=Line)
    refused: int = 0
    _loading: dict[str, tuple[int, float]] = field(default_factory=dict)
    _steps: deque[tuple[int, float]] = field(default_factory=deque)
    _free_s: float = 0.0
    """When the engine's last step ended."""

    def worth(self, tokens: int) -> bool:
        """True if a load of *tokens* is expected to pay; the same until something changes it."""
        if not self.budget or min(self.loads.samples, self.prompts.samples) < ENOUGH:
            return True
        quick = self.loads.seconds(tokens) <= self.budget * self.prompts.seconds(tokens)
        return quick or self.refused % TRY_EVERY == TRY_EVERY - 1

    def refuse(self) -> None:
        """A hit was computed because its load was not expected to pay."""
        self.refused += 1

    def load_began(self, request_id: str, tokens: int, now_s: float) -> None:
        """A load was planned."""
        if not self.budget:
            return
        if self.refused % TRY_EVERY == TRY_EVERY - 1:
            self.refused += 1  # it may have been one that is only tried
        self._loading[request_id] = (tokens, now_s)

    def load_ended(self, request_id: str, now_s: float, *, well: bool) -> None:
        """A load ended; a failed one says nothing of how long loads take."""
        began = self._loading.pop(request_id, None)
        if began is not None and well:
            tokens, began_s = began
            self.loads.add(tokens, now_s - began_s)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._loading.pop(request_id, None)

    def step_began(self, tokens: int, now_s: float) -> None:
        """The engine planned a step of *tokens*; 0 if it runs no model."""
        if not tokens or len(self._steps) >= _QUEUE:
            # Which results belong to which step is not certain any more.
            self._steps.clear()
        else:
            self._steps.append((tokens, now_s))

    def step_ended(self, now_s: float) -> None:
        """The results of the oldest step are there."""
        if self._steps:
            tokens, began_s = self._steps.popleft()
            if tokens >= PROMPT_TOKENS:
                self.prompts.add(tokens, now_s - max(began_s, self._free_s))
        self._free_s = now_s
