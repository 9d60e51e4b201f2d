# SPDX-License-Identifier: Apache-2.0
"""The specification of gather and scatter: one block, one plane at a time, in NumPy.

Every faster implementation is tested against these functions; they are not meant to be quick.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.planes import Layout

__all__ = ["check_blocks", "gather_blocks", "scatter_blocks"]

Bytes = NDArray[np.uint8]


def check_blocks(block_ids: NDArray[np.int64], blocks: int, null_block: int | None = None) -> None:
    """Refuse ids that no copy may be started with; *null_block* may occur, any number of times.

    Raises:
        IndexError: an id is not in [0, *blocks*).
        ValueError: an id occurs twice.
    """
    seen = set()
    for block in block_ids.tolist():
        if block == null_block:
            continue
        if not 0 <= block < blocks:
            raise IndexError(f"block {block} is not in [0, {blocks})")
        if block in seen:
            raise ValueError(f"block {block} is named twice")
        seen.add(block)


def gather_blocks(
    storages: Sequence[Bytes],
    layout: Layout,
    block_ids: NDArray[np.int64],
    out: Bytes,
    null_block: int | None = None,
) -> None:
    """Copy the blocks of one chunk out of the paged cache.

    Args:
        storages: the engine's memory, each storage as flat bytes.
        layout: where its planes are.
        block_ids: the chunk's blocks in token order, shape (n,), distinct.
        out: the chunk, ``layout.chunk_bytes(n)`` bytes, plane-major; fully overwritten.
        null_block: the engine's id for "no block" (outside a sliding window, say): gathered as zeros, may repeat.

    Raises:
        IndexError, ValueError: as ``check_blocks``; nothing has been copied.
    """
    check_blocks(block_ids, layout.blocks, null_block)
    done = 0
    for plane in layout.planes:
        for block in block_ids.tolist():
            start = plane.offset + block * plane.stride
            held = 0 if block == null_block else storages[plane.storage][start : start + plane.block_bytes]
            out[done : done + plane.block_bytes] = held
            done += plane.block_bytes


def scatter_blocks(
    storages: Sequence[Bytes],
    layout: Layout,
    block_ids: NDArray[np.int64],
    skip_blocks: int,
    data: Bytes,
    null_block: int | None = None,
) -> None:
    """Copy one chunk into the paged cache, the inverse of ``gather_blocks``.

    Args:
        storages: the engine's memory, each storage as flat bytes.
        layout: where its planes are.
        block_ids: the chunk's blocks in token order, shape (n,), distinct.
        skip_blocks: how many blocks at the start are not written.
        data: the chunk, ``layout.chunk_bytes(n)`` bytes.
        null_block: the engine's id for "no block": its bytes go nowhere, it may repeat.

    Raises:
        IndexError, ValueError: as ``check_blocks``; nothing has been copied.
    """
    check_blocks(block_ids, layout.blocks, null_block)
    done = 0
    for plane in layout.planes:
        for position, block in enumerate(block_ids.tolist()):
            if position >= skip_blocks and block != null_block:
                start = plane.offset + block * plane.stride
                storages[plane.storage][start : start + plane.block_bytes] = data[done : done + plane.block_bytes]
            done += plane.block_bytes
