# SPDX-License-Identifier: Apache-2.0
"""The mover's kernel against the specification, over the same tables as the engine's."""

from typing import Any

import numpy as np
import pytest
from tests.gpu.layouts import BLOCKS, engine_layouts, on_host, random_layout, storages_of

from kvpool.transfer import reference
from kvpool.transfer.plan import NOWHERE, parts_of, plane_table, slot_ids
from kvpool.transfer.planes import Layout

PER_CHUNK = 8


def on_device(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array).cuda()


def check(layout: Layout, slot_bytes: int, rng: np.random.Generator) -> None:
    import torch

    from kvpool.transfer.mover.kernel import MoveKernel

    storages = storages_of(layout, rng)
    torch.cuda.synchronize()
    table = plane_table(layout, [s.data_ptr() for s in storages])
    kernel, stream = MoveKernel(table), torch.cuda.Stream()
    chosen = rng.permutation(np.arange(1, BLOCKS))[:PER_CHUNK][None, :]
    chosen[0, rng.integers(PER_CHUNK)] = 0
    ids = slot_ids(chosen, BLOCKS, null_block=0)
    rows, numbers = on_device(table.rows), on_device(ids)
    before = on_host(storages)
    whole = np.full(layout.chunk_bytes(PER_CHUNK), 0x5A, dtype=np.uint8)
    reference.gather_blocks(before, layout, ids[0], whole, NOWHERE)
    brought = rng.integers(0, 256, len(whole), dtype=np.uint8)
    for part in parts_of(layout, PER_CHUNK, slot_bytes):
        slot = on_device(np.full(part.length, 0xEE, dtype=np.uint8))
        torch.cuda.synchronize()
        given = table.arguments(part, 1, PER_CHUNK, rows.data_ptr(), numbers.data_ptr(), slot.data_ptr())
        kernel.launch(given, stream.cuda_stream, scatter=False)
        stream.synchronize()
        np.testing.assert_array_equal(slot.cpu().numpy(), whole[part.offset : part.offset + part.length])
    for part in parts_of(layout, PER_CHUNK, slot_bytes):
        slot = on_device(brought[part.offset : part.offset + part.length])
        torch.cuda.synchronize()
        given = table.arguments(part, 1, PER_CHUNK, rows.data_ptr(), numbers.data_ptr(), slot.data_ptr())
        kernel.launch(given, stream.cuda_stream, scatter=True)
        stream.synchronize()
    reference.scatter_blocks(before, layout, ids[0], 0, brought, NOWHERE)
    for got, wanted in zip(on_host(storages), before, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", list(engine_layouts()))
def test_layouts_of_engines(name: str) -> None:
    layout = engine_layouts()[name]

    check(
        layout,
        max(layout.chunk_bytes(PER_CHUNK) // 2, *(p.block_bytes for p in layout.planes)),
        np.random.default_rng(3),
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_layouts(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    layout = random_layout(rng)

    check(layout, max(layout.chunk_bytes(PER_CHUNK) // 3, *(p.block_bytes for p in layout.planes), 1), rng)
