# SPDX-License-Identifier: Apache-2.0
"""Opening an arena: check the folder, lock, sweep, check the memory, adopt, recover."""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from kvpool.arena.errors import ArenaError
from kvpool.arena.files import Folder, PoolLock
from kvpool.arena.header import scan
from kvpool.arena.leftovers import Fate, Living, sweep_other_pools, sweep_own
from kvpool.arena.preflight import Machine, check_folder, check_memory, real_machine
from kvpool.arena.scopes import Scopes
from kvpool.arena.segment import Segment, file_names
from kvpool.arena.shm import Parts, ShmArena
from kvpool.arena.sizes import Sizes, sizes_of
from kvpool.config import L1Config
from kvpool.model.errors import PoolFull
from kvpool.model.slots import RecoveredRegion

__all__ = ["open_arena"]


def open_arena(
    config: L1Config, pool_uid: str, living: Living | None = None, machine: Machine | None = None
) -> ShmArena:
    """Open the arena of a pool on this node. Takes no memory yet for regions that are empty, see ``ShmArena.grow``.

    The folder is made (mode 0700) if the one above it exists.

    Args:
        config: size, folder and what to do with them.
        pool_uid: the pool; its files bear this name.
        living: the pools that exist; what others left is removed. Without it nothing of others is.
        machine: what is asked about memory and mounts; this machine by default.

    Raises:
        ArenaError: it cannot be opened as configured; the text names field, numbers and remedy.
    """
    machine = machine or real_machine()
    sizes = sizes_of(config)
    path = Path(config.directory)
    with contextlib.suppress(OSError):  # where it cannot be made, opening it says why
        path.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as resources:
        folder = resources.enter_context(Folder(path))
        check_folder(path, folder.info(), machine, allow_disk=config.allow_disk)
        lock = PoolLock(folder, pool_uid)
        resources.callback(lock.close, remove=not config.persist)
        fates = sweep_other_pools(folder, _and_this(living, pool_uid))
        swept = [pool for pool, fate in fates.items() if fate is Fate.REMOVED]
        adopted = sweep_own(folder, pool_uid, sizes)
        check_memory(config, sizes, _taken_bytes(folder, pool_uid, adopted), machine)
        if not config.persist:
            resources.callback(_remove_files, folder, pool_uid, sizes)
        segments = _open_segments(folder, pool_uid, sizes, adopted, resources)
        parts = Parts(folder, pool_uid, sizes, segments, Scopes(folder, pool_uid), swept, config, machine)
        recovered, sequence = _recover(segments, sizes.stride)
        return ShmArena(parts, recovered, sequence, resources.pop_all())


def _and_this(living: Living | None, pool_uid: str) -> Living | None:
    return living and replace(living, pools={*living.pools, pool_uid})


def _taken_bytes(folder: Folder, pool_uid: str, adopted: Sequence[int]) -> int:
    return sum(folder.allocated_bytes(name) for region in adopted for name in file_names(pool_uid, region))


def _open_segments(
    folder: Folder, pool_uid: str, sizes: Sizes, adopted: Collection[int], resources: contextlib.ExitStack
) -> list[Segment]:
    """Open all regions, with new files where none were left; *resources* closes them."""
    segments = []
    known = set(adopted)
    try:
        for region in range(sizes.regions):
            make = Segment if region in known else Segment.create
            segment = make(folder, pool_uid, region, sizes)
            resources.callback(segment.close)
            segment.adopt()
            segments.append(segment)
    except (PoolFull, OSError) as e:
        raise ArenaError(f"l1.directory: segments cannot be opened ({e}); free memory, or lower l1.size_bytes") from e
    return segments


def _recover(segments: Sequence[Segment], stride: int) -> tuple[list[RecoveredRegion], int]:
    """Return what the headers say, and the first sequence number that none of them has. No chunk is read."""
    recovered = []
    sequence = 0
    for segment in segments:
        if segment.cut is None:
            continue
        found = scan(segment.headers)
        sequence = max(sequence, found.sequence)
        first = segment.region * stride
        recovered.append(
            RecoveredRegion(
                region=segment.region,
                slot_bytes=segment.cut.slot_bytes,
                owner=segment.cut.owner,
                ready=found.ready + first,
                ready_rows=found.ready_rows,
                writing=found.writing + first,
                writing_rows=found.writing_rows,
            )
        )
    return recovered, sequence + 1


def _remove_files(folder: Folder, pool_uid: str, sizes: Sizes) -> None:
    """Remove everything but the lock, whose holder does that last."""
    for region in range(sizes.regions):
        for name in file_names(pool_uid, region):
            folder.remove(name)
    Scopes(folder, pool_uid).remove()
