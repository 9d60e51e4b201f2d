# SPDX-License-Identifier: Apache-2.0
"""Which part of the memory belongs to whom: a tenant with a quota has that share for itself, the others share the rest.

Shares are whole regions. A region belongs to one holder, and room is made for a holder out of its own regions alone, so
nothing that one holder stores can cost another one a chunk.
"""

from collections.abc import Mapping
from typing import Final

__all__ = ["EVERYBODY", "Quotas"]

EVERYBODY: Final = ""
"""Holder of the regions of all tenants without a quota."""


class Quotas:
    """Shares by tenant."""

    def __init__(self) -> None:
        """Start without any: all memory is everybody's."""
        self._shares: dict[str, float] = {}

    def set(self, shares: Mapping[str, float]) -> None:
        """Give each tenant of *shares* that part of the memory; together at most 1."""
        self._shares = dict(shares)

    def __bool__(self) -> bool:
        return bool(self._shares)

    def holders(self) -> tuple[str, ...]:
        """Return whoever has regions."""
        return EVERYBODY, *sorted(self._shares)

    def holder(self, tenant: str) -> str:
        """Return whose regions the chunks of *tenant* go to."""
        return tenant if tenant in self._shares else EVERYBODY

    def regions(self, holder: str, usable: int) -> int:
        """Return how many of *usable* regions a holder may have: a tenant with a quota at least one."""
        if holder != EVERYBODY:
            return max(1, int(self._shares.get(holder, 0.0) * usable)) if holder in self._shares else 0
        return max(0, usable - sum(self.regions(tenant, usable) for tenant in self._shares))
