# SPDX-License-Identifier: Apache-2.0
"""The kernel in Triton, and its launch by the compiled handle."""

from typing import Any, Final

import triton
import triton.language as tl

from kvpool.transfer.cuda import Kernel
from kvpool.transfer.plan import PlaneTable

__all__ = ["compiled", "move"]

_WARPS: Final = 4
_WARP_THREADS: Final = 32
_TILE_BYTES: Final = 4096
"""What one program moves at a time: several short pieces or one long one. Twice as much takes so many registers that
fewer programs crowd into a multiprocessor, and the engine's products lost 2.8 instead of 2.2 % at 2 KiB runs."""

_ADDRESS: Final = 1 << 40
"""Makes Triton take a number for 64 bits wide."""

_NUMBERS: Final = ("table", "ids", "slot", "total", "pieces", "blocks", "step", "whole", "base")
_WORDS: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator]
def move(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917, ANN201, D417 - Triton infers all types
    table,  # noqa: ANN001 - Triton infers types from what is passed
    ids,  # noqa: ANN001
    slot,  # noqa: ANN001
    total,  # noqa: ANN001
    pieces,  # noqa: ANN001
    blocks,  # noqa: ANN001
    step,  # noqa: ANN001
    whole,  # noqa: ANN001
    base,  # noqa: ANN001
    WORD: tl.constexpr,  # noqa: N803
    UNIT: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    SCATTER: tl.constexpr,  # noqa: N803
):
    """Move pieces of blocks between the paged cache and a slot, ROWS pieces of at most WIDTH words at a time.

    Each program takes every ``num_programs``-th tile, so that few programs, on few multiprocessors, can do it all.

    Args:
        table: address of the first row of ``plan.PlaneTable`` that the launch moves.
        ids: address of the block ids, *whole* for each chunk, from the first block that the launch moves.
        slot: address of the slot.
        total: chunks times *pieces* times *blocks*.
        pieces: rows of the table that the launch moves.
        blocks: blocks of each chunk that it moves.
        step: bytes of one chunk in the slot.
        whole: blocks of a whole chunk.
        base: bytes of the planes before the first row, for one block of the chunk.
    """
    numbers = ids.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, WIDTH)
    size: tl.constexpr = WORD.primitive_bitwidth // 8
    for first in range(tl.program_id(0).to(tl.int64) * ROWS, total, tl.num_programs(0) * ROWS):
        index = first + tl.arange(0, ROWS)
        live = index < total
        block = index % blocks
        chunk = index // (blocks * pieces)
        row = table.to(tl.pointer_type(tl.int64)) + (index // blocks) % pieces * 6
        number = tl.load(numbers + chunk * whole + block, mask=live, other=-1)
        words = tl.multiple_of(tl.load(row + 5, mask=live, other=0), UNIT // size)
        outer = tl.load(row, mask=live) + number * tl.load(row + 1, mask=live)
        before = (tl.load(row + 2, mask=live) - base) * whole + block * tl.load(row + 3, mask=live)
        inner = slot + chunk * step + before + tl.load(row + 4, mask=live)
        cache = tl.multiple_of(outer.to(tl.pointer_type(WORD)), UNIT)[:, None] + lane[None, :]
        ring = tl.multiple_of(inner.to(tl.pointer_type(WORD)), UNIT)[:, None] + lane[None, :]
        there = lane[None, :] < words[:, None]
        held = there & (number >= 0)[:, None]
        if SCATTER:
            tl.store(cache, tl.load(ring, mask=held), mask=held)
        else:
            tl.store(ring, tl.load(cache, mask=held, other=0), mask=there)


def compiled(table: PlaneTable, *, scatter: bool) -> tuple[Kernel, int]:
    """Compile the kernel for a layout and the current device; takes a second the first time, then Triton's cache.

    Returns:
        The kernel, and how many pieces one of its programs moves.

    Raises:
        RuntimeError: this version of Triton made other parameters than nine 64-bit numbers.
    """
    word = table.word_bytes
    width = triton.next_power_of_2(-(-table.piece_bytes // word))
    rows = max(1, _TILE_BYTES // (width * word))
    numbers = [_ADDRESS] * len(_NUMBERS)
    options = {"WORD": _WORDS[word], "UNIT": table.unit, "WIDTH": width, "ROWS": rows, "SCATTER": scatter}
    made: Any = move.warmup(*numbers, **options, num_warps=_WARPS, grid=(1,))
    made._init_handles()  # noqa: SLF001 - the handle has no public name
    signature = [made.src.signature[name] for name in _NUMBERS]
    if signature != ["i64"] * len(_NUMBERS):
        raise RuntimeError(f"Triton {triton.__version__} compiled parameters {signature}")
    return Kernel(made.function, _WARPS * _WARP_THREADS, made.metadata.shared, len(_NUMBERS)), rows
