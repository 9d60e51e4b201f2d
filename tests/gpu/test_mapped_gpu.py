# SPDX-License-Identifier: Apache-2.0
"""Mode mapped with a real mover process on a device: it maps the cache of this process, and moves its bytes."""

import ctypes
import tempfile
import time
from collections.abc import Iterator, Sequence
from ctypes import byref
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.mover_rig import SECRET, MoverRig
from tests.gpu.layouts import BLOCKS, engine_layouts, on_host, storages_of
from tests.gpu.waiting import PATIENCE_S

from kvpool.transfer import cuda, reference
from kvpool.transfer.cuda import Context
from kvpool.transfer.exports import CudaCache
from kvpool.transfer.mapped import MappedJob, MappedMover
from kvpool.transfer.mover.messages import Direction, Join, Ring
from kvpool.transfer.mover.supervision import MOVER_COMMAND
from kvpool.transfer.plan import NOWHERE, slot_ids
from kvpool.transfer.planes import Layout, Plane
from kvpool.transfer.tensors import Storage

PER_CHUNK, CHUNKS = 8, 6


def soon() -> float:
    return time.monotonic() + PATIENCE_S


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on a tmpfs: no other files can be registered with CUDA."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def context() -> Context:
    import torch

    torch.cuda.synchronize()
    return Context.current()


def run(mover: MappedMover, direction: Direction, grant: bytes, ids: np.ndarray) -> frozenset[int] | None:
    job = MappedJob(group=0, grant=grant, ids=ids, chunks=range(CHUNKS))
    mover.begin(direction, job, soon())
    job.finish()
    return job.lost


def round_trip(
    folder: Path, memory: Path, context: Context, layout: Layout, storages: Sequence[Storage], slot_bytes: int
) -> bytes:
    """Store random blocks of a cache and load them into others; returns what was stored of the first chunk."""
    size = layout.chunk_bytes(PER_CHUNK)
    ring = Ring(device=context.uuid, handle=b"", slot_bytes=slot_bytes, slots=3, generation=1)
    regions = (-(-2 * CHUNKS * size // 4096) * 4096,)
    with MoverRig(folder, ring, regions=regions, command=MOVER_COMMAND, memory=memory) as rig:
        cache = CudaCache(context, [layout], storages)
        cache.fit([PER_CHUNK])
        joins = [Join(secret=SECRET, direction=d, generation=1) for d in Direction]
        mover = MappedMover(cache, rig.ready().mover.address, joins, soon(), lambda: None)
        places = [(0, 2 * n * size) for n in range(CHUNKS)]
        rig.grant(b"s", Direction.STORE, places, size)
        rig.grant(b"l", Direction.LOAD, places, size)

        assert run(mover, Direction.STORE, b"s", some_ids(1)) == frozenset()
        assert run(mover, Direction.LOAD, b"l", some_ids(2)) == frozenset()

        assert all(rig.bytes_at(region, offset + size, size) == b"\xdd" * size for region, offset in places)
        mover.close()
        return rig.bytes_at(0, 0, size)


def some_ids(seed: int) -> np.ndarray:
    """Half of them in a row, so that both copies and the kernel have something to do."""
    ids = np.random.default_rng(seed).permutation(BLOCKS)[: CHUNKS * PER_CHUNK].reshape(CHUNKS, PER_CHUNK)
    ids[: CHUNKS // 2] = np.sort(ids[: CHUNKS // 2], axis=1)
    return slot_ids(ids, BLOCKS)


def moved(layout: Layout, before: list[np.ndarray]) -> tuple[bytes, list[np.ndarray]]:
    """What a round trip makes of a cache: the first chunk's bytes, and the storages afterwards."""
    chunks = np.zeros((CHUNKS, layout.chunk_bytes(PER_CHUNK)), dtype=np.uint8)
    after = [storage.copy() for storage in before]
    for chunk, ids in zip(chunks, some_ids(1), strict=True):
        reference.gather_blocks(before, layout, ids, chunk, NOWHERE)
    for chunk, ids in zip(chunks, some_ids(2), strict=True):
        reference.scatter_blocks(after, layout, ids, 0, chunk, NOWHERE)
    return chunks[0].tobytes(), after


@pytest.mark.parametrize("name", list(engine_layouts()))
@pytest.mark.parametrize("share", [2.5, 0.4])
def test_round_trip(tmp_path: Path, memory: Path, context: Context, name: str, share: float) -> None:
    layout = engine_layouts()[name]
    tensors = storages_of(layout, np.random.default_rng(5))
    storages = [Storage("cuda", 0, t.data_ptr(), t.numel()) for t in tensors]
    slot = max(int(layout.chunk_bytes(PER_CHUNK) * share), *(p.block_bytes for p in layout.planes)) // 256 * 256
    first, after = moved(layout, on_host(tensors))

    assert round_trip(tmp_path, memory, context, layout, storages, slot) == first

    for storage, wanted in zip(on_host(tensors), after, strict=True):
        np.testing.assert_array_equal(storage, wanted)


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("device", ctypes.c_int))


class _Properties(ctypes.Structure):
    """As the driver declares what an allocation of virtual memory is to be."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


def virtual_memory(context: Context, piece_bytes: int, pieces: int) -> int:
    """Return the address of pieces of virtual memory, one after the other, that can be exported."""
    driver = ctypes.CDLL("libcuda.so.1")
    wanted = _Properties(kind=1, handles=1, location=_Location(1, context._device))
    start = cuda.made("cuMemAddressReserve", pieces * piece_bytes, 0, 0, 0)
    for number in range(pieces):
        handle = ctypes.c_uint64()
        made = driver.cuMemCreate(byref(handle), ctypes.c_size_t(piece_bytes), byref(wanted), ctypes.c_uint64(0))
        assert made == 0
        cuda._call("cuMemMap", start + number * piece_bytes, piece_bytes, 0, handle.value, 0)
        cuda._call("cuMemRelease", handle.value)
    access = cuda._Access(1, context._device, 3)
    cuda._call("cuMemSetAccess", start, pieces * piece_bytes, byref(access), 1)
    return start


def test_virtual_memory_travels_by_descriptors(tmp_path: Path, memory: Path, context: Context) -> None:
    piece, pieces = 2 << 20, 3
    stride = piece * pieces // BLOCKS // 256 * 256
    plane = Plane(name="0", storage=0, offset=0, stride=stride, block_bytes=stride, packing="p")
    layout = Layout(planes=(plane,), blocks=BLOCKS, block_tokens=16)
    start, length = virtual_memory(context, piece, pieces), piece * pieces
    host = context.allocate_host(length)
    seen = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(host))
    seen[:] = np.random.default_rng(3).integers(0, 256, length, dtype=np.uint8)
    stream = context.stream(urgent=False)
    context.copy_in(start, host, length, stream)
    context.wait_stream(stream)
    first, after = moved(layout, [seen.copy()])
    storages = [Storage("cuda", 0, start, length)]

    assert round_trip(tmp_path, memory, context, layout, storages, 4 * PER_CHUNK * stride) == first

    context.copy_out(host, start, length, stream)
    context.wait_stream(stream)
    np.testing.assert_array_equal(seen, after[0])
