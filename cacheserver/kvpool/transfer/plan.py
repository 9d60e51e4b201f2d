# SPDX-License-Identifier: Apache-2.0
"""From planes to launches, as plain numbers: the table that both kernels read, and what fits into one ring slot.

A launch moves either several whole chunks, or one part of a chunk that is larger than a slot: some planes, or some
blocks of one plane. Either way the bytes in the slot are a range of the chunk, which is plane-major.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.planes import Layout, LayoutError

__all__ = [
    "COLUMNS",
    "NOWHERE",
    "WORD_BYTES",
    "Part",
    "PlaneTable",
    "Turn",
    "parts_of",
    "plane_table",
    "slot_ids",
    "turns_of",
]

NOWHERE: Final = -1
"""A block that a launch does not touch: it is gathered as zeros and scattered nowhere."""

COLUMNS: Final = 6
"""Of a table row: address in block 0, step between blocks, bytes of all planes before, bytes of a block in its plane,
where the piece begins in the block, its words."""

WORD_BYTES: Final = 8
"""Of a block's id and of a number in a plane table."""

_GREATEST_UNIT: Final = 16
_PIECE_BYTES: Final = 4096
"""One program of a kernel moves this much, so that long runs are spread over the device, too."""


@dataclass(frozen=True, slots=True)
class PlaneTable:
    """A layout as the kernels read it: one row for each piece of a plane's block, in the order of the chunk's bytes."""

    rows: NDArray[np.int64]
    """Shape (pieces, COLUMNS)."""

    firsts: NDArray[np.int64]
    """Row where each plane begins, and at the end the number of rows."""

    unit: int
    """Bytes, a power of two up to 16, that divide every address, step and length."""

    piece_bytes: int
    """Bytes of the largest piece."""

    @property
    def word_bytes(self) -> int:
        """Bytes of one word; column 5 counts in them. No kernel has larger numbers than 8 bytes."""
        return min(self.unit, 8)

    def arguments(self, part: "Part", chunks: int, whole: int, table: int, ids: int, slot: int) -> tuple[int, ...]:
        """Return a kernel's parameters for a part of *chunks* chunks of *whole* blocks; see ``kernels.move``.

        Args:
            part: what it moves of each chunk.
            chunks: how many lie one after the other in the slot.
            whole: blocks of a chunk.
            table: address of ``rows`` in device memory.
            ids: address of the block ids of the chunks.
            slot: address of the slot.
        """
        first, end = int(self.firsts[part.first_plane]), int(self.firsts[part.end_plane])
        pieces, blocks = end - first, part.end_block - part.first_block
        return (
            table + first * COLUMNS * WORD_BYTES,
            ids + part.first_block * WORD_BYTES,
            slot,
            chunks * pieces * blocks,
            pieces,
            blocks,
            part.length,
            whole,
            int(self.rows[first, 2]),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a chunk's bytes that one launch can move: whole planes, or some blocks of one plane."""

    first_plane: int
    end_plane: int
    first_block: int
    end_block: int
    offset: int
    """Where it begins in the chunk."""

    length: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What one slot carries at a time: one part of these chunks of a job, one after the other."""

    first: int
    """Place of the first of them among those that the job moves."""

    chunks: tuple[int, ...]
    part: Part

    @property
    def length(self) -> int:
        """Bytes in the slot."""
        return len(self.chunks) * self.part.length

    def without(self, chunks: Collection[int]) -> list["Turn"]:
        """Return turns of what is left without some chunks: one for each run of neighbours."""
        runs: list[list[int]] = [[]]
        for place, chunk in enumerate(self.chunks):
            if chunk in chunks:
                runs.append([])
            else:
                runs[-1].append(place)
        return [
            Turn(first=self.first + run[0], chunks=self.chunks[run[0] : run[-1] + 1], part=self.part)
            for run in runs
            if run
        ]


def plane_table(layout: Layout, addresses: Sequence[int], piece_bytes: int = _PIECE_BYTES) -> PlaneTable:
    """Make the table of a layout whose storages begin at *addresses*."""
    numbers = [n for p in layout.planes for n in (addresses[p.storage] + p.offset, p.stride, p.block_bytes)]
    unit = math.gcd(_GREATEST_UNIT, *numbers)
    piece = piece_bytes // unit * unit or unit
    rows: list[tuple[int, ...]] = []
    firsts, before = [], 0
    for plane in layout.planes:
        firsts.append(len(rows))
        start = addresses[plane.storage] + plane.offset
        for within in range(0, plane.block_bytes, piece):
            words = min(piece, plane.block_bytes - within) // min(unit, 8)
            rows.append((start + within, plane.stride, before, plane.block_bytes, within, words))
        before += plane.block_bytes
    firsts.append(len(rows))
    largest = min(piece, max(p.block_bytes for p in layout.planes))
    return PlaneTable(np.array(rows, dtype=np.int64), np.array(firsts, dtype=np.int64), unit, largest)


def parts_of(layout: Layout, blocks_per_chunk: int, slot_bytes: int) -> tuple[Part, ...]:
    """Cut a chunk into as few parts as fit a slot.

    Raises:
        LayoutError: one block of one plane does not fit.
    """
    sizes = [p.block_bytes for p in layout.planes]
    before = [0, *accumulate(sizes)]
    parts, first = [], 0
    while first < len(sizes):
        end = first
        while end < len(sizes) and (before[end + 1] - before[first]) * blocks_per_chunk <= slot_bytes:
            end += 1
        if end > first:
            start, stop = before[first] * blocks_per_chunk, before[end] * blocks_per_chunk
            parts.append(Part(first, end, 0, blocks_per_chunk, start, stop - start))
        else:
            end = first + 1
            parts += _parts_of_plane(first, before[first], sizes[first], blocks_per_chunk, slot_bytes)
        first = end
    return tuple(parts)


def _parts_of_plane(plane: int, before: int, size: int, blocks: int, slot_bytes: int) -> Iterator[Part]:
    step = slot_bytes // size
    if not step:
        raise LayoutError(f"a block of {size} bytes does not fit a ring slot of {slot_bytes}; raise ring.slot_bytes")
    for first in range(0, blocks, step):
        end = min(first + step, blocks)
        yield Part(plane, plane + 1, first, end, before * blocks + first * size, (end - first) * size)


def turns_of(chunks: Sequence[int], parts: Sequence[Part], slot_bytes: int) -> Iterator[Turn]:
    """Spread chunks over slots: as many as fit where a chunk is one part, else one slot for each part."""
    if len(parts) > 1:
        yield from (Turn(place, (chunk,), part) for place, chunk in enumerate(chunks) for part in parts)
        return
    step = slot_bytes // parts[0].length
    for first in range(0, len(chunks), step):
        yield Turn(first, tuple(chunks[first : first + step]), parts[0])


def _twice(ids: NDArray[np.int64], blocks: int) -> bool:
    """True if an id occurs twice; all are in [0, *blocks*). A mark for each block is quicker than sorting."""
    marks = np.zeros(blocks, dtype=np.bool_)
    marks[ids] = True
    return int(np.count_nonzero(marks)) != ids.size


def slot_ids(
    block_ids: NDArray[np.int64], blocks: int, *, null_block: int | None = None, skip: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Check the block ids of whole chunks and mark those that no launch may touch.

    Args:
        block_ids: shape (chunks, blocks per chunk).
        blocks: how many the engine has.
        null_block: the engine's id for "no block"; may occur any number of times.
        skip: for each chunk, how many blocks at its start are left alone; they are not looked at.

    Returns:
        The ids, NOWHERE for what is left alone; contiguous.

    Raises:
        IndexError: an id is not in [0, *blocks*).
        ValueError: an id occurs twice.
    """
    ids = np.array(block_ids, dtype=np.int64, order="C")
    untouched = np.zeros(ids.shape, dtype=np.bool_) if null_block is None else ids == null_block
    if skip is not None:
        untouched |= np.arange(ids.shape[1]) < skip[:, None]
    used = ids[~untouched]
    if used.size and not (used.min() >= 0 and used.max() < blocks):
        raise IndexError(f"blocks {used[(used < 0) | (used >= blocks)][:8].tolist()} are not in [0, {blocks})")
    if _twice(used, blocks):
        numbers, counts = np.unique(used, return_counts=True)
        raise ValueError(f"blocks {numbers[counts > 1][:8].tolist()} are named twice")
    ids[untouched] = NOWHERE
    return ids
