# SPDX-License-Identifier: Apache-2.0
"""The mover's CUDA device in mode mapped, over a driver that runs everything as late as it may."""

import os
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.lazy_driver import UUID, LazyDriver, LazyKernel
from tests.fakes.mapped_device import PAGE

from kvpool.transfer import cuda, reference
from kvpool.transfer.mover import kernel
from kvpool.transfer.mover.device import CudaMoverDevice
from kvpool.transfer.mover.messages import Direction, Piece, Ring
from kvpool.transfer.mover.ports import DeviceFailedError, Gather, MappedGroup
from kvpool.transfer.plan import NOWHERE, parts_of, turns_of
from kvpool.transfer.planes import Layout, Plane

BLOCKS, WHOLE, CHUNKS = 32, 4, 5
SIZES = (96, 5000, 160)
STARTS = (0, 8192, 200_000)
PLANES = tuple(
    Plane(name=str(n), storage=0, offset=start, stride=size + 32, block_bytes=size, packing="p")
    for n, (start, size) in enumerate(zip(STARTS, SIZES, strict=True))
)
LAYOUT = Layout(planes=PLANES, blocks=BLOCKS, block_tokens=16)
CHUNK = LAYOUT.chunk_bytes(WHOLE)
LENGTH = max(p.offset + BLOCKS * p.stride for p in LAYOUT.planes)
IDS = np.random.default_rng(1).permutation(BLOCKS)[: CHUNKS * WHOLE].reshape(CHUNKS, WHOLE).astype(np.int64)
IDS[2, 1] = NOWHERE


class World:
    def __init__(self, driver: LazyDriver, slot_bytes: int) -> None:
        self.driver = driver
        self.ring = Ring(device=UUID, handle=b"", slot_bytes=slot_bytes, slots=2, generation=1)
        self.device = CudaMoverDevice(self.ring)
        self.cache = np.random.default_rng(2).integers(0, 256, LENGTH, dtype=np.uint8)
        self.arena = np.full(CHUNKS * CHUNK, 0xDD, dtype=np.uint8)
        handle = self.cache.ctypes.data.to_bytes(64, "little")
        address = self.device.attach([(Piece(memory=0, length=LENGTH, handle=handle), -1)])
        self.costs = self.device.prepare([MappedGroup(LAYOUT, [address], WHOLE)])
        self.driver.ran.clear()

    def move(self, direction: Direction) -> None:
        """Move all chunks as a lane does: ahead as far as slots are free."""
        parts = parts_of(LAYOUT, WHOLE, self.ring.slot_bytes)
        for number, turn in enumerate(turns_of(range(CHUNKS), parts, self.ring.slot_bytes)):
            slot = number % self.ring.slots
            if number >= self.ring.slots:
                self.device.wait(direction, slot)
            copies = [
                (
                    self.ring.offset(direction, slot) + n * turn.part.length,
                    self.arena.ctypes.data + chunk * CHUNK + turn.part.offset,
                    turn.part.length,
                )
                for n, chunk in enumerate(turn.chunks)
            ]
            self.device.by_kernel(direction, slot, Gather(0, turn.part, IDS[list(turn.chunks)]), copies)
        for slot in range(self.ring.slots):
            self.device.wait(direction, slot)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> LazyDriver:
    made = LazyDriver()
    monkeypatch.setattr(cuda, "_driver", lambda: made)
    monkeypatch.setattr(LazyKernel, "driver", made, raising=False)
    monkeypatch.setattr("kvpool.transfer.mover.device.MoveKernel", LazyKernel)
    return made


@pytest.mark.parametrize("slot_bytes", [2 * CHUNK + 64, CHUNK, CHUNK // 2, 5000])
def test_kernels_and_copies_keep_their_order_both_ways(driver: LazyDriver, slot_bytes: int) -> None:
    world = World(driver, slot_bytes)
    before = world.cache.copy()
    wanted = np.zeros((CHUNKS, CHUNK), dtype=np.uint8)
    for chunk, ids in zip(wanted, IDS, strict=True):
        reference.gather_blocks([before], LAYOUT, ids, chunk, NOWHERE)

    world.move(Direction.STORE)

    assert (world.arena.reshape(CHUNKS, CHUNK) == wanted).all()
    assert (world.cache == before).all()
    world.arena[:] = np.random.default_rng(3).integers(0, 256, len(world.arena), dtype=np.uint8)
    for data, ids in zip(world.arena.reshape(CHUNKS, CHUNK), IDS, strict=True):
        reference.scatter_blocks([before], LAYOUT, ids, 0, data, NOWHERE)

    world.move(Direction.LOAD)

    assert (world.cache == before).all()
    assert {"gather", "scatter", "in", "out"} <= set(driver.ran)


@pytest.mark.behaviour("D030")
@pytest.mark.parametrize("direction", list(Direction))
def test_nothing_of_one_direction_runs_before_what_the_other_waits_for(
    driver: LazyDriver, direction: Direction
) -> None:
    world = World(driver, CHUNK)
    (part,) = parts_of(LAYOUT, WHOLE, CHUNK)

    def queue(way: Direction) -> None:
        copies = [(world.ring.offset(way, 0), world.arena.ctypes.data, CHUNK)]
        world.device.by_kernel(way, 0, Gather(0, part, IDS[:1]), copies)

    queue(direction)
    world.device.wait(direction, 0)
    alone = driver.ran.copy()
    driver.ran.clear()
    for way in (*(d for d in Direction if d is not direction), direction):
        queue(way)

    world.device.wait(direction, 0)

    assert driver.ran == alone


@pytest.mark.parametrize("direction", list(Direction))
def test_runs_are_copied_without_a_kernel(driver: LazyDriver, direction: Direction) -> None:
    world = World(driver, CHUNK)
    cache, arena = world.cache.copy(), world.arena.copy()
    base, host = world.cache.ctypes.data, world.arena.ctypes.data

    world.device.by_copies(direction, 1, [(base + 64, host + 512, 100), (base + 4096, host, 256)])
    world.device.wait(direction, 1)

    if direction is Direction.STORE:
        arena[512:612], arena[:256] = cache[64:164], cache[4096:4352]
    else:
        cache[64:164], cache[4096:4352] = arena[512:612], arena[:256]
    assert (world.cache == cache).all()
    assert (world.arena == arena).all()
    assert set(driver.ran) <= {"in", "out"}


def test_measuring_writes_to_no_cache_and_finds_costs(driver: LazyDriver) -> None:
    world = World(driver, CHUNK)

    assert min(world.costs.copy_s, world.costs.launch_s) > 0
    assert world.costs.byte_s >= 0
    assert (world.cache == np.random.default_rng(2).integers(0, 256, LENGTH, dtype=np.uint8)).all()


def test_pieces_of_virtual_memory_are_mapped_one_after_the_other(driver: LazyDriver, tmp_path: Path) -> None:
    device, pieces = World(driver, CHUNK).device, []
    for number in range(3):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number]) * PAGE)
        pieces.append((Piece(memory=1, length=PAGE), os.open(path, os.O_RDWR)))

    address = device.attach(pieces)

    for _, descriptor in pieces:
        os.close(descriptor)
    seen = np.zeros(3 * PAGE, dtype=np.uint8)
    device.by_copies(Direction.STORE, 0, [(address, seen.ctypes.data, 3 * PAGE)])
    device.wait(Direction.STORE, 0)
    assert seen.tobytes() == b"".join(bytes([n]) * PAGE for n in range(3))


def test_a_driver_that_does_not_take_the_kernel_is_named(driver: LazyDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.transfer.mover.device.MoveKernel", kernel.MoveKernel)
    kernel._module.cache_clear()
    driver["cuModuleLoadData"] = lambda *_: 222

    with pytest.raises(DeviceFailedError, match="cuModuleLoadData"):
        World(driver, CHUNK)
