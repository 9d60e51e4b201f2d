# SPDX-License-Identifier: Apache-2.0
"""How an arena is cut: equal regions, never more than the configured size.

What is left over after the last whole region is not used. With automatic regions (a power of two, at least 32 of them)
that is less than a 32nd, and nothing where the size is a whole number of GiB.
"""

from dataclasses import dataclass
from typing import Final

from kvpool.config import L1Config

__all__ = ["LEAST_SLOT_BYTES", "PAGE_BYTES", "Sizes", "sizes_of"]

PAGE_BYTES: Final = 4096
LEAST_SLOT_BYTES: Final = PAGE_BYTES
"""Smallest slot; a region has at most ``region_bytes / LEAST_SLOT_BYTES`` of them, and that is the stride."""

_LEAST_REGION: Final = 4 << 20
_GREATEST_REGION: Final = 1 << 30
_LEAST_COUNT: Final = 32
_HEADER_SHARE: Final = 256
"""Headers take at most this part of an arena whose slots have at least 48 KiB; checked before start."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of one arena."""

    regions: int
    """All that there may ever be."""

    region_bytes: int
    first: int | None = None
    """To be used at first; all if not given."""

    @property
    def usable(self) -> int:
        """Regions to be used at first."""
        return self.regions if self.first is None else self.first

    @property
    def stride(self) -> int:
        """Slot numbers of one region."""
        return self.region_bytes // LEAST_SLOT_BYTES

    @property
    def data_bytes(self) -> int:
        """Bytes for chunks, at first."""
        return self.usable * self.region_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes for chunks and their headers."""
        return self.data_bytes + self.data_bytes // _HEADER_SHARE + self.regions * PAGE_BYTES


def sizes_of(config: L1Config) -> Sizes:
    """Return regions for *config*: as configured, or automatic ones between 4 MiB and 1 GiB."""
    most = config.max_bytes or config.size_bytes
    region_bytes = config.segment_bytes or _automatic(most)
    return Sizes(most // region_bytes, region_bytes, min(config.size_bytes, most) // region_bytes)


def _automatic(size_bytes: int) -> int:
    """The largest power of two that leaves at least 32 regions, within the bounds."""
    power = 1 << (size_bytes // _LEAST_COUNT).bit_length() - 1
    return min(max(power, _LEAST_REGION), _GREATEST_REGION)
