# SPDX-License-Identifier: Apache-2.0
"""The ring with a real mover process on a device: bytes, both ways, and what a mover's death leaves."""

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.fakes.mover_rig import MoverRig
from tests.gpu.devices import engine_device
from tests.gpu.layouts import BLOCKS, engine_layouts, on_host, storages_of
from tests.gpu.waiting import PATIENCE_S

from kvpool.transfer import reference
from kvpool.transfer.mover.inventory import visible_gpus
from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.mover.supervision import MOVER_COMMAND, MoverState
from kvpool.transfer.plan import NOWHERE, slot_ids
from kvpool.transfer.planes import Layout
from kvpool.transfer.ring import RingRetiredError
from kvpool.transfer.ring_ports import EngineDevice, RingJob

PER_CHUNK, CHUNKS = 8, 6


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def ids_of(rng: np.random.Generator) -> np.ndarray:
    return slot_ids(rng.permutation(BLOCKS)[: CHUNKS * PER_CHUNK].reshape(CHUNKS, PER_CHUNK), BLOCKS)


def gathered(layout: Layout, storages: list[np.ndarray], ids: np.ndarray) -> bytes:
    out = np.zeros(layout.chunk_bytes(PER_CHUNK), dtype=np.uint8)
    reference.gather_blocks(storages, layout, ids, out, NOWHERE)
    return out.tobytes()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on a tmpfs: no other files can be registered with CUDA."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def rig(
    folder: Path, memory: Path, device: EngineDevice, length: int, command: Sequence[str] = MOVER_COMMAND
) -> MoverRig:
    regions = (-(-2 * CHUNKS * length // 4096) * 4096,)
    return MoverRig(folder, device.ring, regions=regions, command=command, memory=memory)


@pytest.mark.parametrize("name", list(engine_layouts()))
@pytest.mark.parametrize("share", [2.5, 0.4])
def test_round_trip(tmp_path: Path, memory: Path, name: str, share: float) -> None:
    import torch

    layout, rng = engine_layouts()[name], np.random.default_rng(5)
    storages = storages_of(layout, rng)
    size = layout.chunk_bytes(PER_CHUNK)
    slot = max(int(size * share), *(p.block_bytes for p in layout.planes)) // 256 * 256
    device = engine_device(layout, storages, slot, PER_CHUNK)
    ids = ids_of(rng)
    with rig(tmp_path, memory, device, size) as server:
        ring = server.ready().join(device)
        places = [(0, 2 * n * size) for n in range(CHUNKS)]
        server.grant(b"s", Direction.STORE, places, size)
        before = on_host(storages)

        assert ring.store(RingJob(group=0, grant=b"s", ids=ids, chunks=range(CHUNKS)), soon()) == frozenset()

        for number, (region, offset) in enumerate(places):
            assert server.bytes_at(region, offset, size) == gathered(layout, before, ids[number])
            assert server.bytes_at(region, offset + size, size) == b"\xdd" * size
        for storage in storages:
            storage.fill_(0xAA)
        torch.cuda.synchronize()
        server.grant(b"l", Direction.LOAD, places, size)

        assert ring.load(RingJob(group=0, grant=b"l", ids=ids, chunks=range(CHUNKS)), soon()) == frozenset()

        wanted = [np.full_like(s, 0xAA) for s in before]
        for number in range(CHUNKS):
            data = np.frombuffer(gathered(layout, before, ids[number]), dtype=np.uint8)
            reference.scatter_blocks(wanted, layout, ids[number], 0, data, NOWHERE)
        for got, expected in zip(on_host(storages), wanted, strict=True):
            np.testing.assert_array_equal(got, expected)
        ring.close()
    device.free()


def test_a_store_follows_the_step_that_writes_its_blocks(tmp_path: Path, memory: Path) -> None:
    """The engine's stream is kept busy, then writes; the gather waits for its event and not for its host thread."""
    import torch

    layout, rng = engine_layouts()["blocks first"], np.random.default_rng(6)
    storages = storages_of(layout, rng)
    size = layout.chunk_bytes(PER_CHUNK)
    device = engine_device(layout, storages, size, PER_CHUNK)
    ids = ids_of(rng)
    with rig(tmp_path, memory, device, size) as server:
        ring = server.ready().join(device)
        server.grant(b"s", Direction.STORE, [(0, n * size) for n in range(CHUNKS)], size)
        torch.cuda._sleep(400_000_000)
        for storage in storages:
            storage.fill_(0x42)
        step = torch.cuda.Event()
        step.record()

        ring.store(RingJob(group=0, grant=b"s", ids=ids, chunks=range(CHUNKS), after=step.cuda_event), soon())

        assert server.bytes_at(0, 0, CHUNKS * size) == b"\x42" * (CHUNKS * size)
        ring.close()
    device.free()


@pytest.mark.parametrize("wait_s", [0.0, 0.01, 0.05])
def test_a_mover_killed_at_any_time_costs_the_ring_and_nothing_else(
    tmp_path: Path, memory: Path, wait_s: float
) -> None:
    import torch

    layout, rng = engine_layouts()["keys and values apart"], np.random.default_rng(7)
    storages = storages_of(layout, rng)
    size = layout.chunk_bytes(PER_CHUNK)
    device = engine_device(layout, storages, size, PER_CHUNK)
    job = RingJob(group=0, grant=b"s", ids=ids_of(rng), chunks=list(range(CHUNKS)) * 200)
    with rig(tmp_path, memory, device, size) as server:
        ring = server.ready().join(device)
        # One chunk more than is ever moved: the grant does not end by itself.
        server.grant(b"s", Direction.STORE, [*((0, n * size) for n in range(CHUNKS)), (0, 0)], size)
        seen: list[BaseException] = []

        def run() -> None:
            try:
                while True:
                    ring.store(job, soon())
            except RingRetiredError as e:
                seen.append(e)

        thread = threading.Thread(target=run)
        thread.start()
        threading.Event().wait(wait_s)
        server.mover.kill("the test says so")
        server.until(lambda: server.mover.state is MoverState.REAPED)
        thread.join(PATIENCE_S)

        assert len(seen) == 1, f"{seen}; the thread moves on: {thread.is_alive()}; mover: {server.mover.reason}"
        ring.close()
    device.free()
    # The engine's device works on.
    assert int(torch.ones(1000, device="cuda").sum()) == 1000


def test_memory_of_the_arena_can_be_taken_back(tmp_path: Path, memory: Path) -> None:
    layout, rng = engine_layouts()["blocks first"], np.random.default_rng(11)
    device = engine_device(layout, storages_of(layout, rng), layout.chunk_bytes(PER_CHUNK), PER_CHUNK)
    with rig(tmp_path, memory, device, layout.chunk_bytes(PER_CHUNK)) as server:
        ring = server.ready().join(device)
        size = layout.chunk_bytes(PER_CHUNK)
        server.grant(b"s", Direction.STORE, [(0, n * size) for n in range(CHUNKS)], size)
        ring.store(RingJob(group=0, grant=b"s", ids=ids_of(rng), chunks=range(CHUNKS)), soon())
        maps = Path(f"/proc/{server.mover.pid}/maps")
        assert str(server.regions[0]) in maps.read_text()

        server.mover.take_segment(0)
        server.until(lambda: str(server.regions[0]) not in maps.read_text())

        assert server.mover.state is MoverState.READY
        ring.close()
    device.free()


def test_memory_is_back_after_rings_come_and_go(tmp_path: Path, memory: Path) -> None:
    import torch

    layout, rng = engine_layouts()["blocks first"], np.random.default_rng(8)
    storages = storages_of(layout, rng)
    size = layout.chunk_bytes(PER_CHUNK)
    free = []
    for turn in range(3):
        device = engine_device(layout, storages, size, PER_CHUNK, slots=4)
        folder = tmp_path / str(turn)
        folder.mkdir()
        with rig(folder, memory, device, size) as server:
            server.ready().join(device).close()
        device.free()
        torch.cuda.synchronize()
        free.append(visible_gpus()[0].free_bytes)

    assert free[1] == free[2]


def test_a_device_that_is_not_visible_is_refused_with_those_that_are(tmp_path: Path, memory: Path) -> None:
    layout, rng = engine_layouts()["blocks first"], np.random.default_rng(9)
    device = engine_device(layout, storages_of(layout, rng), layout.chunk_bytes(PER_CHUNK), PER_CHUNK)
    wrong = msgspec.structs.replace(device.ring, device=bytes(16))
    with MoverRig(tmp_path, wrong, command=MOVER_COMMAND) as server:
        server.until(lambda: server.mover.state is MoverState.REAPED)
        assert "is not visible here" in server.mover.reason
        assert visible_gpus()[0].uuid in server.mover.reason
    device.free()


def test_private_namespaces_do_not_matter(tmp_path: Path, memory: Path) -> None:
    """The mover in its own IPC, mount and PID namespaces, as in another container."""
    unshare = shutil.which("unshare")
    probe = [unshare or "unshare", "--ipc", "--mount", "true"]
    if unshare is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a process have namespaces of its own")
    layout, rng = engine_layouts()["blocks first"], np.random.default_rng(10)
    storages = storages_of(layout, rng)
    size = layout.chunk_bytes(PER_CHUNK)
    device = engine_device(layout, storages, size, PER_CHUNK)
    # Without --pid: the mover checks that its parent is the server, whose number it could not see.
    command = [unshare, "--ipc", "--mount", sys.executable, "-m", "kvpool.transfer.mover"]
    with rig(tmp_path, memory, device, size, command) as server:
        ring = server.ready().join(device)
        server.grant(b"s", Direction.STORE, [(0, n * size) for n in range(CHUNKS)], size)
        ids = ids_of(rng)
        ring.store(RingJob(group=0, grant=b"s", ids=ids, chunks=range(CHUNKS)), soon())
        assert server.bytes_at(0, 0, size) == gathered(layout, on_host(storages), ids[0])
        ring.close()
    device.free()
