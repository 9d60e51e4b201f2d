# SPDX-License-Identifier: Apache-2.0
"""The kernels against their twin: every layout, skipped and null blocks, parts of chunks; targets poisoned before."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.gpu.devices import engine_device
from tests.gpu.layouts import BLOCKS, engine_layouts, on_host, random_layout, storages_of

from kvpool.transfer import reference
from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.plan import NOWHERE, Turn, slot_ids
from kvpool.transfer.planes import Layout
from kvpool.transfer.ring_ports import RingJob

PER_CHUNK, CHUNKS = 8, 5


@contextmanager
def opened(layout: Layout, storages: Sequence[object], slot_bytes: int) -> Iterator[object]:
    device = engine_device(layout, storages, slot_bytes, PER_CHUNK, slots=2)
    try:
        yield device
    finally:
        device.free()


def slot_access(device: object, direction: Direction, slot: int, length: int) -> tuple[Any, int]:
    context = device._context  # type: ignore[attr-defined]
    return context, device._base + device.ring.offset(direction, slot)  # type: ignore[attr-defined]


def read_slot(device: object, direction: Direction, slot: int, length: int) -> np.ndarray:
    context, address = slot_access(device, direction, slot, length)
    out = np.empty(length, dtype=np.uint8)
    stream = device._streams[direction][slot]  # type: ignore[attr-defined]
    context.copy_out(out.ctypes.data, address, length, stream)
    context.wait_stream(stream)
    return out


def write_slot(device: object, direction: Direction, slot: int, data: np.ndarray) -> None:
    context, address = slot_access(device, direction, slot, len(data))
    stream = device._streams[direction][slot]  # type: ignore[attr-defined]
    context.copy_in(address, data.ctypes.data, len(data), stream)
    context.wait_stream(stream)


def random_ids(rng: np.random.Generator) -> np.ndarray:
    ids = rng.permutation(np.arange(1, BLOCKS))[: CHUNKS * PER_CHUNK].reshape(CHUNKS, PER_CHUNK)
    ids[rng.random(ids.shape) < 0.1] = 0
    skip = np.zeros(CHUNKS, dtype=np.int64)
    skip[0] = rng.integers(0, PER_CHUNK)
    return slot_ids(ids, BLOCKS, null_block=0, skip=skip)


def expected_slot(layout: Layout, storages: list[np.ndarray], ids: np.ndarray, turn: Turn) -> np.ndarray:
    pieces = []
    for chunk in turn.chunks:
        whole = np.full(layout.chunk_bytes(PER_CHUNK), 0x5A, dtype=np.uint8)
        reference.gather_blocks(storages, layout, ids[chunk], whole, NOWHERE)
        pieces.append(whole[turn.part.offset : turn.part.offset + turn.part.length])
    return np.concatenate(pieces)


def check(layout: Layout, slot_bytes: int, rng: np.random.Generator) -> None:
    storages = storages_of(layout, rng)
    ids = random_ids(rng)
    with opened(layout, storages, slot_bytes) as device:
        job = RingJob(group=0, grant=b"g", ids=ids, chunks=[0, 1, 3, 4])
        before = on_host(storages)
        turns = list(device.turns(0, job.chunks))  # type: ignore[attr-defined]
        for turn in turns:
            write_slot(device, Direction.STORE, 1, np.full(turn.length, 0xEE, dtype=np.uint8))
            device.launch(Direction.STORE, 1, job, turn)  # type: ignore[attr-defined]
            device.wait(Direction.STORE, 1)  # type: ignore[attr-defined]
            got = read_slot(device, Direction.STORE, 1, turn.length)
            np.testing.assert_array_equal(got, expected_slot(layout, before, ids, turn))
        wanted = [s.copy() for s in before]
        brought = {c: rng.integers(0, 256, layout.chunk_bytes(PER_CHUNK), dtype=np.uint8) for c in job.chunks}
        for chunk, data in brought.items():
            reference.scatter_blocks(wanted, layout, ids[chunk], 0, data, NOWHERE)
        for turn in turns:
            part = turn.part
            data = np.concatenate([brought[c][part.offset : part.offset + part.length] for c in turn.chunks])
            write_slot(device, Direction.LOAD, 0, data)
            device.launch(Direction.LOAD, 0, job, turn)  # type: ignore[attr-defined]
            device.wait(Direction.LOAD, 0)  # type: ignore[attr-defined]
        for got_storage, wanted_storage in zip(on_host(storages), wanted, strict=True):
            np.testing.assert_array_equal(got_storage, wanted_storage)


@pytest.mark.parametrize("name", list(engine_layouts()))
@pytest.mark.parametrize("share", [2.5, 1.0, 0.4])
def test_layouts_of_engines(name: str, share: float) -> None:
    layout = engine_layouts()[name]
    largest = max(p.block_bytes for p in layout.planes)
    slot = max(largest, int(layout.chunk_bytes(PER_CHUNK) * share)) // 256 * 256

    check(layout, slot, np.random.default_rng(3))


@pytest.mark.parametrize("seed", range(24))
def test_random_layouts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng)
    largest = max(p.block_bytes for p in layout.planes)
    slot = int(max(largest, layout.chunk_bytes(PER_CHUNK) * rng.choice([0.3, 1, 3]))) + 255

    check(layout, slot // 256 * 256, rng)
