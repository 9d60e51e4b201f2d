# SPDX-License-Identifier: Apache-2.0
"""Blocks through a stage, over a driver that runs everything as late as it may."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.fakes.lazy_driver import LazyDriver
from tests.fakes.staged_engine import staging

from kvpool.transfer import cuda, reference
from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.plan import NOWHERE
from kvpool.transfer.planes import Layout, Plane

BLOCKS, WHOLE = 32, 5
PLANES = tuple(
    Plane(name=str(n), storage=0, offset=start, stride=size + 32, block_bytes=size, packing="p")
    for n, (start, size) in enumerate([(0, 96), (8192, 5000), (200_000, 160)])
)
LAYOUT = Layout(planes=PLANES, blocks=BLOCKS, block_tokens=16)
CHUNK = LAYOUT.chunk_bytes(WHOLE)
IDS = np.array([7, 3, NOWHERE, 30, 0], dtype=np.int64)


class World:
    def __init__(self, driver: LazyDriver, make: Any, stage_bytes: int) -> None:
        self.driver = driver
        self.cache = np.random.default_rng(2).integers(0, 256, 220_000, dtype=np.uint8)
        self.blocks = make([LAYOUT], [self.cache.ctypes.data], stage_bytes)
        self.host = np.random.default_rng(3).integers(0, 256, CHUNK, dtype=np.uint8)

    def lock(self) -> None:
        assert self.blocks.locks.lock(self.host.ctypes.data, CHUNK, writable=True)


@pytest.fixture(params=[10_000, 11_000, 1 << 20])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with staging() as (driver, make):
        yield World(driver, make, request.param)


@pytest.mark.parametrize("locked", [True, False])
def test_chunks_move_both_ways(world: World, locked: bool) -> None:
    if locked:
        world.lock()
    wanted, before = np.zeros(CHUNK, dtype=np.uint8), world.cache.copy()
    reference.gather_blocks([world.cache], LAYOUT, IDS, wanted, NOWHERE)

    for _ in range(2):
        world.host[:] = 0xDD
        world.blocks.gather(0, IDS, memoryview(world.host))
        assert (world.host == wanted).all()
    assert (world.cache == before).all()
    world.host[:] = np.random.default_rng(4).integers(0, 256, CHUNK, dtype=np.uint8)
    reference.scatter_blocks([before], LAYOUT, IDS, 1, world.host, NOWHERE)
    world.blocks.scatter(0, IDS, 1, memoryview(world.host))

    assert (world.cache == before).all()


def test_copies_go_to_locked_memory_itself_and_to_no_other(world: World) -> None:
    places: list[int] = []
    real = world.driver.cuMemcpyDtoHAsync_v2
    world.driver["cuMemcpyDtoHAsync_v2"] = lambda host, *rest: (places.append(host), real(host, *rest), 0)[-1]
    start = world.host.ctypes.data

    world.blocks.gather(0, IDS, memoryview(world.host))
    assert places
    assert not any(start <= place < start + CHUNK for place in places)
    places.clear()
    world.lock()
    world.blocks.gather(0, IDS, memoryview(world.host))

    assert places
    assert all(start <= place < start + CHUNK for place in places)


@pytest.mark.parametrize("way", list(Direction))
def test_a_copy_that_fails_leaves_none_under_way(world: World, way: Direction) -> None:
    """What comes after may be another's bytes in the same memory."""
    world.lock()
    call = world.blocks.gather if way is Direction.STORE else lambda g, i, d: world.blocks.scatter(g, i, 0, d)
    world.driver["cuEventRecord"] = lambda *_: 719
    with pytest.raises(cuda.CudaError, match="cuEventRecord"):
        call(0, IDS, memoryview(world.host))
    del world.driver["cuEventRecord"]
    host, cache = world.host.copy(), world.cache.copy()

    for stream in list(world.driver._queued):
        world.driver.cuStreamSynchronize(stream)

    assert (world.host == host).all()
    assert (world.cache == cache).all()
