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
_GREATEST_WIDTH: Final = 1024
_ADDRESS: Final = 1 << 40
"""Makes Triton take a number for 64 bits wide."""

_NUMBERS: Final = ("table", "ids", "slot", "total", "pieces", "blocks", "step", "whole", "base")
_WORDS: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator, unused-ignore]
def move(  # noqa: PLR0913, PLR0917, ANN201, D417 - a kernel's parameters; it returns nothing
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
    SCATTER: tl.constexpr,  # noqa: N803
):
    """Move pieces of blocks between the paged cache and a slot; each program takes every ``num_programs``-th one.

    Args:
        table: address of the first row of ``plan.PlaneTable`` that the launch moves.
        ids: address of the block ids, *whole* for each chunk, from the first block that the launch moves.
        slot: address of the slot.
        total: chunks times *pieces* times *blocks*.
        pieces: rows that the launch moves.
        blocks: blocks of each chunk that it moves.
        step: bytes of one chunk in the slot.
        whole: blocks of a whole chunk.
        base: bytes of the planes before the first row, for one block of the chunk.
    """
    rows = table.to(tl.pointer_type(tl.int64))
    numbers = ids.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, WIDTH)
    size: tl.constexpr = WORD.primitive_bitwidth // 8
    for at in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        block = at % blocks
        piece = (at // blocks) % pieces
        chunk = at // (blocks * pieces)
        row = rows + piece * 6
        number = tl.load(numbers + chunk * whole + block)
        begin = tl.load(row + 4)
        words = tl.multiple_of(tl.load(row + 5), UNIT // size)
        outer = tl.load(row) + number * tl.load(row + 1)
        inner = slot + chunk * step + (tl.load(row + 2) - base) * whole + block * tl.load(row + 3) + begin
        cache = tl.multiple_of(outer.to(tl.pointer_type(WORD)), UNIT)
        ring = tl.multiple_of(inner.to(tl.pointer_type(WORD)), UNIT)
        for first in range(0, words, WIDTH):
            there = first + lane < words
            if SCATTER:
                if number >= 0:
                    tl.store(cache + first + lane, tl.load(ring + first + lane, mask=there), mask=there)
            else:
                held = there & (number >= 0)
                tl.store(ring + first + lane, tl.load(cache + first + lane, mask=held, other=0), mask=there)


def compiled(table: PlaneTable, *, scatter: bool) -> Kernel:
    """Compile the kernel for a layout and the current device; takes a second the first time, then Triton's cache.

    Raises:
        RuntimeError: this version of Triton made other parameters than nine 64-bit numbers.
    """
    word = table.word_bytes
    width = min(_GREATEST_WIDTH, triton.next_power_of_2(-(-table.piece_bytes // word)))
    numbers = [_ADDRESS] * len(_NUMBERS)
    options = {"WORD": _WORDS[word], "UNIT": table.unit, "WIDTH": width, "SCATTER": scatter}
    made: Any = move.warmup(*numbers, **options, num_warps=_WARPS, grid=(1,))
    made._init_handles()  # noqa: SLF001 - the handle has no public name
    signature = [made.src.signature[name] for name in _NUMBERS]
    if signature != ["i64"] * len(_NUMBERS):
        raise RuntimeError(f"Triton {triton.__version__} compiled parameters {signature}")
    return Kernel(made.function, _WARPS * _WARP_THREADS, made.metadata.shared, len(_NUMBERS))
