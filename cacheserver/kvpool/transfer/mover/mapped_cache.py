# SPDX-License-Identifier: Apache-2.0
"""A mapped client's cache as its mover sees it: memory that came piece by piece, the planes in it, what jobs may name.

Whatever the client says is checked before it reaches the device: planes lie in memory that was exported, blocks are
distinct and exist.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.mover.messages import CacheGroup, Direction, Export, Job, Piece, Ring
from kvpool.transfer.mover.ports import DeviceCopy, Gather, MappedGroup, MoverDevice
from kvpool.transfer.mover.runs import Costs, host_copies, most_runs, runs_of
from kvpool.transfer.plan import NOWHERE, Part, Turn, parts_of, slot_ids, turns_of
from kvpool.transfer.planes import Layout, LayoutError, Plane

__all__ = ["MappedCache"]


class MappedCache:
    """See the module. ``add`` and ``open`` by one thread, the rest by any once ``open`` has returned."""

    def __init__(self, device: MoverDevice, ring: Ring) -> None:
        self._device, self._ring = device, ring
        self._pieces: dict[int, list[tuple[Piece, int]]] = defaultdict(list)
        self._groups: tuple[MappedGroup, ...] = ()
        self._parts: list[tuple[Part, ...]] = []
        self._costs = Costs(copy_s=0.0, launch_s=0.0, byte_s=0.0)

    def add(self, piece: Piece, descriptor: int) -> None:
        """Take a piece; its descriptor (-1 for none) belongs to the cache."""
        self._pieces[piece.memory].append((piece, descriptor))

    def open(self, export: Export) -> None:
        """Map all pieces and make the kernel ready; once.

        Raises:
            LayoutError: what the client exports cannot be; nothing is mapped.
            DeviceFailedError: the device does not map it.
        """
        try:
            if self._groups:
                raise LayoutError("a cache is exported once")
            lengths = {memory: _length(pieces) for memory, pieces in self._pieces.items()}
            layouts = [_layout(number, group, lengths) for number, group in enumerate(export.groups)]
            wholes = [group.blocks_per_chunk for group in export.groups]
            self._parts = [
                parts_of(layout, n, self._ring.slot_bytes) for layout, n in zip(layouts, wholes, strict=True)
            ]
            addresses = [0] * (max(lengths) + 1)
            for memory, pieces in self._pieces.items():
                addresses[memory] = self._device.attach(pieces)
        finally:
            self._close_descriptors()
        groups = tuple(MappedGroup(layout, addresses, n) for layout, n in zip(layouts, wholes, strict=True))
        self._costs = self._device.prepare(groups)
        self._groups = groups

    def ids(self, job: Job) -> NDArray[np.int64]:
        """Return the blocks of a job's chunks, shape (chunks, blocks per chunk).

        Raises:
            IndexError, ValueError: there are no such chunks or blocks, or a block is named twice.
        """
        if job.group >= len(self._groups):
            raise IndexError(f"group {job.group} of {len(self._groups)}")
        group = self._groups[job.group]
        ids = np.frombuffer(job.ids, dtype="<i8").reshape(len(job.chunks), group.whole)
        if len(set(job.chunks)) != len(job.chunks):
            raise ValueError("a chunk is named twice")
        return slot_ids(ids, group.layout.blocks, null_block=NOWHERE)

    def turns(self, job: Job) -> Iterator[Turn]:
        """Spread a job's chunks over slots."""
        return turns_of(job.chunks, self._parts[job.group], self._ring.slot_bytes)

    def queue(
        self,
        direction: Direction,
        slot: int,
        job: Job,
        turn: Turn,
        ids: NDArray[np.int64],
        places: Sequence[DeviceCopy],
    ) -> None:
        """Queue one turn the cheaper way.

        Args:
            direction: stores or loads.
            slot: free until the device's ``wait`` for it returns.
            job: what the turn is of.
            turn: the turn.
            ids: of the turn's chunks.
            places: where in the slot, host address and length, for stretches of whole chunks that cover the turn.

        Raises:
            DeviceFailedError: it cannot be queued.
        """
        group = self._groups[job.group]
        runs = most_runs(group.layout, ids, turn.part)
        # Blocks that are NOWHERE are stored as zeros, which the kernel writes.
        whole = direction is Direction.LOAD or not (ids == NOWHERE).any()
        if whole and self._costs.by_copies(runs, turn.length, len(places)):
            found = runs_of(group.layout, group.addresses, ids, turn.part)
            self._device.by_copies(direction, slot, host_copies(found, places))
            return
        start = self._ring.offset(direction, slot)
        copies = [(start + within, address, length) for within, address, length in places]
        self._device.by_kernel(direction, slot, Gather(job.group, turn.part, ids), copies)

    def _close_descriptors(self) -> None:
        for pieces in self._pieces.values():
            for _, descriptor in pieces:
                if descriptor >= 0:
                    os.close(descriptor)
        self._pieces.clear()


def _length(pieces: Sequence[tuple[Piece, int]]) -> int:
    if len(pieces) > 1 and any(piece.handle is not None for piece, _ in pieces):
        raise LayoutError("an allocation with a handle is one piece")
    return sum(piece.length for piece, _ in pieces)


def _layout(number: int, group: CacheGroup, lengths: dict[int, int]) -> Layout:
    """Return a group as the kernels' tables want it; its storages are the memories.

    Raises:
        LayoutError: a plane does not lie in exported memory, or its blocks overlap.
    """
    for plane in group.planes:
        end = plane.offset + (group.blocks - 1) * plane.stride + plane.block_bytes
        if end > lengths.get(plane.memory, 0):
            raise LayoutError(
                f"group {number}: a plane ends at {end} of memory {plane.memory}, which does not reach it"
            )
        if group.blocks > 1 and plane.stride < plane.block_bytes:
            raise LayoutError(f"group {number}: blocks of {plane.block_bytes} bytes at a distance of {plane.stride}")
    planes = tuple(
        Plane(name=str(n), storage=p.memory, offset=p.offset, stride=p.stride, block_bytes=p.block_bytes, packing="")
        for n, p in enumerate(group.planes)
    )
    return Layout(planes=planes, blocks=group.blocks, block_tokens=1)
