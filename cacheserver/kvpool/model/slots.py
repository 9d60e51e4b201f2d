# SPDX-License-Identifier: Apache-2.0
"""Numbers and records that the index, the arena and the wire share: slot numbers, header rows, placements.

A slot's number is ``region * stride + position``: the arena says the stride. Regions are equal parts of the arena, each
cut into slots of one size for one owner.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.model.checksum import CHECKSUM_BYTES
from kvpool.model.keys import DIGEST_BYTES

__all__ = [
    "CHECK",
    "HEADER_ROW",
    "NO_DIGEST",
    "PLACEMENT",
    "SERVER_OWNED",
    "Disposition",
    "RecoveredRegion",
    "SlotArray",
    "header_rows",
]

SlotArray = NDArray[np.int64]

NO_DIGEST: Final = bytes(DIGEST_BYTES)
"""Parent of a first chunk in a slot header."""

SERVER_OWNED: Final = ""
"""Owner of regions that the server or a mover writes; a tenant's name owns regions its clients may map."""

HEADER_ROW: Final = np.dtype(
    [
        ("scope", f"V{DIGEST_BYTES}"),
        ("digest", f"V{DIGEST_BYTES}"),
        ("parent", f"V{DIGEST_BYTES}"),
        ("writer", "V16"),
        ("checksum", f"V{CHECKSUM_BYTES}"),
        ("length", "<u8"),
        ("ordinal", "<u4"),
        ("group", "<u2"),
        ("shard", "<u2"),
        ("checksum_kind", "u1"),
    ]
)
"""What a slot holds: everything that makes its key, who wrote it, and how to check its bytes."""

PLACEMENT: Final = np.dtype(
    [("slot", "<i8"), ("memory", "<u4"), ("disposition", "<u4"), ("offset", "<u8"), ("length", "<u8")]
)
"""Where one chunk's bytes go or lie: one row a chunk, in the raw frame of a Prepared or Readable reply.

``memory`` is what a client of the same node asks the descriptor socket for; ``offset`` counts from its start.
"""


CHECK: Final = np.dtype([("kind", "u1"), ("checksum", f"V{CHECKSUM_BYTES}")])
"""A chunk's checksum and how it was made (``ChecksumKind``): one row a chunk, as server and movers tell each other."""


class Disposition(IntEnum):
    """What is to be done about one chunk of a store or a load."""

    # Answers to PrepareStore
    WRITE = 1
    """Put the bytes into the given slot, then commit."""
    PRESENT = 2
    """The server has it already."""
    PENDING = 3
    """Another writer is at it."""
    FULL = 4
    """No slot could be freed."""
    QUOTA = 5
    """The tenant's share is used up."""
    PINNED = 6
    """Slots exist but every one is held."""

    # Answers to PrepareRetrieve
    IN_PLACE = 16
    """Read it from the given region, which this client may map."""
    STREAM = 17
    """Ask for it with ReadChunk: it lies where this client may not map."""

    # Answers to CommitStore and CommitRetrieve
    STORED = 32
    """The bytes are visible to lookups."""
    ABANDONED = 33
    """Nothing was kept: the writer gave up, its lease ran out, or bytes were missing."""
    VOUCHED = 34
    """The bytes that were read are the chunk's, all of them."""
    LOST = 35
    """The bytes that were read must not be used."""


@dataclass(frozen=True, slots=True)
class RecoveredRegion:
    """What the arena found in one region that a former server left."""

    region: int
    slot_bytes: int
    owner: str
    """Tenant whose clients may map the region, or ``SERVER_OWNED``."""

    ready: SlotArray
    """Slots whose header says that the bytes are complete, those written first before others."""

    ready_rows: NDArray[np.void]
    """Their header rows (``HEADER_ROW``), in the same order."""

    writing: SlotArray
    """Slots that were being written, or whose header does not check: somebody may still write to them."""

    writing_rows: NDArray[np.void]
    """Their header rows; all zero where the header does not check."""


def header_rows(count: int) -> NDArray[np.void]:
    """Return *count* zeroed header rows."""
    return np.zeros(count, dtype=HEADER_ROW)
