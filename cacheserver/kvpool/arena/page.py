# SPDX-License-Identifier: Apache-2.0
"""The page at the start of a header file: whose region it is, and how it is cut.

    bytes    0..127   identity, written once before the file gets its name
    bytes  512..1575  the cut: mark, check, slot size, slots, owner; changes as a slot header does
    bytes 2048..2055  nonzero once the bytes of the region may have been seen or mapped by anybody

A region whose cut has no mark is empty, whatever slot headers follow.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.arena.files import LAYOUT_VERSION
from kvpool.arena.header import CHECK, HEADER_BYTES, MARK, Store, Words, apply, erasing
from kvpool.arena.mixing import check_of
from kvpool.arena.sizes import PAGE_BYTES, Sizes

__all__ = ["OWNER_BYTES", "Cut", "Page", "cutting", "identity_page"]

OWNER_BYTES: Final = 1024

_MAGIC: Final = b"kvpoolL1"
_CUT_AT: Final = 512
_USED_AT: Final = 2048
_FIRST: Final = np.zeros(1, dtype=np.int64)

_IDENTITY: Final = np.dtype(
    [
        ("check", "<u8"),
        ("magic", "V8"),
        ("version", "<u4"),
        ("region", "<u4"),
        ("region_bytes", "<u8"),
        ("stride", "<u8"),
        ("header_bytes", "<u8"),
        ("pool", "V64"),
    ]
)
_CUT: Final = np.dtype(
    [
        ("mark", "<u8"),
        ("check", "<u8"),
        ("slot_bytes", "<u8"),
        ("slots", "<u8"),
        ("owner_length", "<u8"),
        ("owner", f"V{OWNER_BYTES}"),
    ]
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a region is cut into slots."""

    slot_bytes: int
    slots: int
    owner: str


def identity_page(pool_uid: str, region: int, sizes: Sizes) -> bytes:
    """Return the page of a region that is not cut."""
    record = np.zeros(1, dtype=_IDENTITY)
    record["magic"] = np.void(_MAGIC)
    record["version"] = LAYOUT_VERSION
    record["region"] = region
    record["region_bytes"] = sizes.region_bytes
    record["stride"] = sizes.stride
    record["header_bytes"] = HEADER_BYTES
    record["pool"] = np.void(pool_uid.encode())
    record["check"] = check_of(record.view(np.uint64).reshape(1, -1))
    return record.tobytes().ljust(PAGE_BYTES, b"\0")


class Page:
    """One mapped page; the thread that owns the arena alone."""

    def __init__(self, page: NDArray[np.uint8]) -> None:
        self._identity = page[: _IDENTITY.itemsize]
        self._cut: Words = page[_CUT_AT : _CUT_AT + _CUT.itemsize].view(np.uint64).reshape(1, -1)
        self._used: Words = page[_USED_AT : _USED_AT + 8].view(np.uint64)

    def is_of(self, pool_uid: str, region: int, sizes: Sizes) -> bool:
        """Return True if the page says exactly this pool, region and sizes, under this version."""
        return self._identity.tobytes() == identity_page(pool_uid, region, sizes)[: _IDENTITY.itemsize]

    @property
    def used(self) -> bool:
        """True once the region has ever been cut: its bytes may be mapped, or be of another tenant."""
        return bool(self._used[0]) or bool(self._cut[0, MARK])

    def set_used(self, *, used: bool) -> None:
        """Say whether anybody may have seen the data file that the region has now."""
        self._used[0] = used

    def cut(self) -> Cut | None:
        """Return the cut; None if the region is empty or the cut's check fails."""
        words = self._cut.copy()
        record = words.view(_CUT)[0, 0]
        check = int(words[0, CHECK])
        words[0, CHECK] = 0
        if not record["mark"] or int(check_of(words)[0]) != check:
            return None
        owner = bytes(record["owner"])[: int(record["owner_length"])].decode()
        return Cut(int(record["slot_bytes"]), int(record["slots"]), owner)

    def erase(self) -> None:
        """Make the region empty, in one store."""
        apply(self._cut, _FIRST, erasing(1))

    def write(self, cut: Cut) -> None:
        """Make the region cut so; a crash leaves it empty or cut."""
        apply(self._cut, _FIRST, cutting(cut))


def cutting(cut: Cut) -> list[Store]:
    """Return the steps that write *cut*, in order: unmark, content, mark."""
    record = np.zeros((1, 1), dtype=_CUT)
    owner = cut.owner.encode()
    record["mark"] = 1
    record["slot_bytes"] = cut.slot_bytes
    record["slots"] = cut.slots
    record["owner_length"] = len(owner)
    record["owner"] = np.void(owner.ljust(OWNER_BYTES, b"\0"))
    words = record.view(np.uint64)
    words[:, CHECK] = check_of(words)
    return [*erasing(1), Store(CHECK, words[:, CHECK:]), Store(MARK, words[:, MARK])]
