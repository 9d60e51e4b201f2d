# SPDX-License-Identifier: Apache-2.0
"""The mapped mode's turns as plain numbers: which runs of the client's cache they are made of, and what moves them.

A run is a stretch of bytes that lies in one piece both in the cache and in the turn. Long runs are copied between the
cache and the arena one by one, and no kernel takes turns with the engine's. Many short ones go through a slot: the
kernel gathers or scatters them, and the slot is copied as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.plan import NOWHERE, Part
from kvpool.transfer.planes import Layout

__all__ = ["Costs", "Runs", "host_copies", "most_runs", "runs_of"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one turn, in the order of its bytes. Blocks that are NOWHERE have none."""

    cache: Numbers
    """Address of each one in the client's cache."""

    within: Numbers
    """Where it begins in the turn's bytes."""

    length: Numbers

    def __len__(self) -> int:
        """Count them."""
        return len(self.cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a device takes beside the time on the link, as the mover measures it at its client's registration."""

    copy_s: float
    """One more copy in a row of small ones."""

    launch_s: float
    """The kernel, however little it moves."""

    byte_s: float
    """The kernel, for each byte."""

    def by_copies(self, runs: int, length: int, places: int) -> bool:
        """True if copying *runs* runs takes no longer than the kernel with *length* bytes and *places* larger copies.

        On a tie copies win: they cost the engine's own kernels nothing.
        """
        return runs * self.copy_s <= self.launch_s + length * self.byte_s + places * self.copy_s


def most_runs(layout: Layout, ids: Numbers, part: Part) -> int:
    """Count the runs of a turn without finding them; planes that happen to follow each other are not looked at."""
    used = ids[:, part.first_block : part.end_block]
    held = used != NOWHERE
    blocks = int(np.count_nonzero(held))
    follows = held[:, 1:] & held[:, :-1] & (used[:, 1:] == used[:, :-1] + 1)
    apart = blocks - int(np.count_nonzero(follows))
    planes = layout.planes[part.first_plane : part.end_plane]
    return sum(apart if plane.stride == plane.block_bytes else blocks for plane in planes)


def runs_of(layout: Layout, addresses: Sequence[int], ids: Numbers, part: Part) -> Runs:
    """Cut a turn into runs.

    Args:
        layout: where its planes are.
        addresses: where its storages begin.
        ids: of all blocks of the turn's chunks, shape (chunks, blocks per chunk), as ``plan.slot_ids`` returns them.
        part: the part of each chunk that the turn moves.
    """
    planes = layout.planes[part.first_plane : part.end_plane]
    start = np.array([addresses[p.storage] + p.offset for p in planes], dtype=np.int64)[:, None]
    stride = np.array([p.stride for p in planes], dtype=np.int64)[:, None]
    size = np.array([p.block_bytes for p in planes], dtype=np.int64)[:, None]
    used = ids[:, None, part.first_block : part.end_block]
    blocks = used.shape[2]
    shape = (len(ids), len(planes), blocks)
    before = np.concatenate(([0], np.cumsum(size[:-1, 0])))[:, None] * blocks
    within = np.arange(len(ids))[:, None, None] * part.length + before + np.arange(blocks) * size
    held = np.broadcast_to(used != NOWHERE, shape).ravel()
    cache = (start + used * stride).ravel()[held]
    length = np.broadcast_to(size, shape).ravel()[held]
    chunk = np.repeat(np.arange(len(ids)), len(planes) * blocks)[held]
    return _merged(cache, within.ravel()[held], length, chunk)


def host_copies(runs: Runs, places: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Find where runs lie in host memory.

    Args:
        runs: of one turn.
        places: where in the turn, host address and length, for stretches of whole chunks that cover it, in order.

    Returns:
        Address in the cache, host address and length of each run.
    """
    begins = np.array([within for within, _, _ in places], dtype=np.int64)
    which = np.searchsorted(begins, runs.within, side="right") - 1
    host = np.array([address for _, address, _ in places], dtype=np.int64)[which] + runs.within - begins[which]
    return list(zip(runs.cache.tolist(), host.tolist(), runs.length.tolist(), strict=True))


def _merged(cache: Numbers, within: Numbers, length: Numbers, chunk: Numbers) -> Runs:
    """Join neighbours of one chunk that follow each other in the cache, too."""
    if not len(cache):
        return Runs(cache, within, length)
    ends = (cache + length)[:-1]
    follows = (ends == cache[1:]) & ((within + length)[:-1] == within[1:]) & (chunk[:-1] == chunk[1:])
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return Runs(cache[first], within[first], np.add.reduceat(length, first))
