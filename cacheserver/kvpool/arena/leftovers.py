# SPDX-License-Identifier: Apache-2.0
"""What former servers left in the folder: which segments can be adopted, which files go, which must stay a while.

A segment of another version or size, or half made, is removed, unless a client still holds it writable: removing its
name would not free its memory. Such a one is set aside under version 0, counted, and removed once its writers are gone.
Files of another pool are removed only where the list of living pools is known and does not name it, that pool took its
lock well before the list was true, no server of it holds that lock now, and no writer is left.
"""

import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from kvpool.arena.errors import ArenaError
from kvpool.arena.files import LAYOUT_VERSION, Folder, Name, PoolLock
from kvpool.arena.page import Page
from kvpool.arena.segment import file_names
from kvpool.arena.sizes import PAGE_BYTES, Sizes

__all__ = ["MARGIN_S", "Fate", "Living", "aside_bytes", "sweep_other_pools", "sweep_own"]

MARGIN_S: Final = 600.0
"""A list of living pools may be this late: the operator keeps it for a minute, and ConfigMaps take theirs to arrive."""

_ASIDE: Final = 0
"""Version in the names of segments set aside; no release ever writes it."""


@dataclass(frozen=True, slots=True)
class Living:
    """Pools that exist, and when that was so."""

    pools: Collection[str]
    """Uids."""

    listed_at: float
    """Seconds since 1970: a pool whose server started later, or less than ``margin_s`` before, is none of the list's
    business."""

    margin_s: float = MARGIN_S


class Fate(StrEnum):
    """What becomes of the files of a pool that is not on the list."""

    REMOVED = "removed"
    SERVED = "a server of it is alive"
    YOUNG = "it is younger than the list of living pools"
    WRITTEN = "a client can still write to them"


def sweep_own(folder: Folder, pool_uid: str, sizes: Sizes) -> list[int]:
    """Return the regions whose files can be adopted; remove or set aside all others of this pool.

    The caller holds the pool's lock.
    """
    names = [n for n in folder.names() if n.pool == pool_uid]
    for name in names:
        if name.temporary:
            folder.remove(name.text)  # never handed to anybody
    adopted = []
    for version, region in _segments(names):
        if _adoptable(folder, pool_uid, version, region, sizes):
            adopted.append(region)
        elif not _remove_segment(folder, pool_uid, version, region):
            _set_aside(folder, pool_uid, version, region)
    return adopted


def aside_bytes(folder: Folder, pool_uid: str) -> int:
    """Remove what was set aside and has no writer any more; returns the bytes that others still hold."""
    held = 0
    for version, region in _segments([n for n in folder.names() if n.pool == pool_uid]):
        if version == _ASIDE and not _remove_segment(folder, pool_uid, version, region):
            held += folder.allocated_bytes(file_names(pool_uid, region, version)[0])
    return held


def sweep_other_pools(folder: Folder, living: Living | None, *, remove: bool = True) -> dict[str, Fate]:
    """Remove what deleted pools left; returns the fate of every pool that is not on the list of *living* ones.

    Without a list nothing is touched; without *remove* nothing is removed, but said what would be.
    """
    if living is None:
        return {}
    found = {n.pool for n in folder.names()} - set(living.pools)
    return {pool: _sweep_pool(folder, pool, living, remove=remove) for pool in sorted(found)}


def _sweep_pool(folder: Folder, pool: str, living: Living, *, remove: bool) -> Fate:
    files = [n for n in folder.names() if n.pool == pool]
    started_at = max((folder.changed_at(n.text) for n in files if n.kind != "data"), default=0.0)
    if started_at > living.listed_at - living.margin_s:
        return Fate.YOUNG
    try:
        lock = PoolLock(folder, pool, quiet=True)
    except ArenaError:
        return Fate.SERVED
    gone = all(folder.writers_gone(n.text) for n in files if n.kind == "data")
    for name in files if gone and remove else []:
        if name.kind != "lock":
            folder.remove(name.text)
    lock.close(remove=gone and remove)
    return Fate.REMOVED if gone else Fate.WRITTEN


def _segments(names: Sequence[Name]) -> list[tuple[int, int]]:
    """Return (version, region) of every segment that has at least one file."""
    return sorted({(n.version, n.region) for n in names if n.version is not None and n.region is not None})


def _adoptable(folder: Folder, pool_uid: str, version: int, region: int, sizes: Sizes) -> bool:
    if version != LAYOUT_VERSION or region >= sizes.regions:
        return False
    data, head = file_names(pool_uid, region)
    if folder.size_bytes(data) != sizes.region_bytes or folder.size_bytes(head) < PAGE_BYTES:
        return False
    try:
        with folder.opened(head) as fd, folder.opened(data), mmap.mmap(fd, PAGE_BYTES) as mapping:
            content = np.frombuffer(mapping[:PAGE_BYTES], dtype=np.uint8)
    except OSError:
        return False
    return Page(content).is_of(pool_uid, region, sizes)


def _remove_segment(folder: Folder, pool_uid: str, version: int, region: int) -> bool:
    """Remove a segment's files unless somebody can still write to it; returns whether they are gone."""
    data, head = file_names(pool_uid, region, version)
    if not folder.writers_gone(data):
        return False
    folder.remove(head)
    folder.remove(data)
    return True


def _set_aside(folder: Folder, pool_uid: str, version: int, region: int) -> None:
    """Give a segment that still has writers a name that no new one needs."""
    if version == _ASIDE:
        return
    data, head = file_names(pool_uid, region, version)
    number = region
    while folder.inode(file_names(pool_uid, number, _ASIDE)[0]):
        number += 1
    folder.remove(head)
    folder.rename(data, file_names(pool_uid, number, _ASIDE)[0])
