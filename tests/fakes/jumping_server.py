# SPDX-License-Identifier: Apache-2.0
"""A cache server whose clocks jump, by a seed: the monotonic one forward, the wall's either way.

python -m tests.fakes.jumping_server SEED --config server.json
"""

import random
import sys
import time

from kvpool.cli.main import main
from kvpool.server import compose

JUMP_EVERY_S = 2.0
LONGEST_JUMP_S = 6.0
DAY_S = 86400.0


class JumpingClock:
    """Real time and what the jumps so far came to."""

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)
        self._jumped_s = self._wall_s = 0.0
        self._next_s = time.monotonic() + JUMP_EVERY_S

    def monotonic(self) -> float:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._chance.uniform(0.5, 2) * JUMP_EVERY_S
            self._jumped_s += self._chance.uniform(0, LONGEST_JUMP_S)
            self._wall_s = self._chance.uniform(-DAY_S, DAY_S)
        return now_s + self._jumped_s

    def wall(self) -> float:
        return time.time() + self._wall_s  # noqa: TID251 - what jumps is the wall clock


if __name__ == "__main__":
    clock = JumpingClock(sys.argv[1])
    real = compose.Clocks
    compose.Clocks = lambda: real(monotonic=clock.monotonic, wall=clock.wall)  # type: ignore[misc,assignment]
    sys.exit(main(sys.argv[2:]))
