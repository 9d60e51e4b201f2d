# SPDX-License-Identifier: Apache-2.0
"""What of the memory may change while the engine serves."""

from collections.abc import Mapping

from kvpool.engine.core import Core

__all__ = ["Room"]


class Room:
    """The size of L1 and its watermarks. All calls come from the engine's thread."""

    def __init__(self, core: Core) -> None:
        """Change *core*."""
        self._core = core

    def resize(self, regions: int, now_s: float) -> None:
        """Use so many regions of the arena from now on: more at once, fewer as their holders let go."""
        self._core.now_s = max(self._core.now_s, now_s)
        self._core.sizing.want(min(regions, self._core.arena.regions), self._core.now_s)

    def set_quotas(self, shares: Mapping[str, float]) -> None:
        """Give tenants shares of the memory; who has more than its own from now on gives regions up, one by one."""
        self._core.index.shares.quotas.set(shares)

    def set_watermarks(self, above: float, to: float) -> None:
        """Evict in the background above a share of slots in use, down to another one."""
        self._core.watermarks = above, to
