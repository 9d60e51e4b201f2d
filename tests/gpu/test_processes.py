# SPDX-License-Identifier: Apache-2.0
"""A server, its movers and engines, each in processes of their own: namespaces, users, deaths, faults, memory."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.clients import digests
from tests.fakes.server_process import ServerProcess
from tests.gpu.children import SPARE_BYTES, Child
from tests.gpu.contract import GpuEngine
from tests.gpu.waiting import holders, until

from kvpool.model.identity import Mode
from kvpool.transfer.mover.inventory import visible_gpus


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    # Sockets that every user reaches, and memory on a tmpfs, without which CUDA registers nothing.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        Path(folder).chmod(0o755)
        l1 = {"directory": memory, "allow_disk": False}
        with ServerProcess(Path(folder), l1=l1, listen={"socket_mode": 0o666}) as made:
            yield made


def movers_of(server: ServerProcess) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"kvpool.transfer.mover" in path.read_bytes():
                stat = path.with_name("stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == server._process.pid and stat[0] != "Z":
                    found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_an_engine_of_another_user(server: ServerProcess) -> None:
    child = Child(server, 1, "store", "load", user=65534, group=65534, extra_groups=[])
    for line in ("ready", "store", "load"):
        child.says(line)
    assert child.ends() == 0


@pytest.mark.parametrize("spaces", [("--ipc", "--mount"), ("--ipc", "--mount", "--pid", "--fork", "--mount-proc")])
def test_an_engine_in_namespaces_of_its_own(server: ServerProcess, spaces: tuple[str, ...]) -> None:
    unshare = shutil.which("unshare")
    probe = [unshare or "unshare", *spaces, "true"]
    if unshare is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"this machine does not let a process have namespaces of its own: {spaces}")
    child = Child(server, 2, "store", "load", before=(unshare, *spaces))
    for line in ("ready", "store", "load"):
        child.says(line)
    assert child.ends() == 0


def test_several_engines_share_one_arena(server: ServerProcess) -> None:
    writer = Child(server, 3, "store", "wait")
    writer.says("ready")
    writer.says("store")
    readers = [Child(server, 3, "load", "store", "load") for _ in range(3)]
    for line in ("ready", "load", "store", "load"):
        for reader in readers:
            reader.says(line)
    assert [r.ends() for r in readers] == [0, 0, 0]
    assert writer.ends() == 0


def test_a_killed_engine_gives_all_memory_back(server: ServerProcess) -> None:
    with GpuEngine(server.address, Mode.RING, model="other") as other:
        other.healthy()
        base = visible_gpus()[0].free_bytes
        for seed in range(3):
            child = Child(server, seed, "store", *["load"] * 200)
            child.says("ready")
            child.says("store")
            child.killed()
        until(
            lambda: visible_gpus()[0].free_bytes >= base - SPARE_BYTES,
            told=lambda: f"{(base - visible_gpus()[0].free_bytes) >> 20} MiB less free than before; {holders()}",
        )
        until(lambda: len(movers_of(server)) == 1, told=lambda: f"movers {movers_of(server)}; {holders()}")
        other.blocks.fill(9)
        other.store(digests(4))
        assert other.load(other.lookup(digests(4)), 128) == frozenset()
        assert (other.bytes_of(128, 4) == other.bytes_of(0, 4)).all()


def test_a_fault_of_one_engine_leaves_the_others_alone(server: ServerProcess) -> None:
    with GpuEngine(server.address, Mode.RING, model="other") as other:
        other.healthy()
        child = Child(server, 4, "store", "fault")
        child.says("ready")
        child.says("store")
        assert (said := child.hears()).startswith("fault "), said
        for number in range(20):
            other.blocks.fill(number)
            keys = digests(4, str(number))
            other.store(keys, request_id=f"s{number}")
            assert other.load(other.lookup(keys, f"l{number}"), 128, request_id=f"l{number}") == frozenset()
            assert (other.bytes_of(128, 4) == other.bytes_of(0, 4)).all()
        child.killed()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_a_mover_that_dies_or_stands_still_costs_the_ring_until_there_is_another(
    server: ServerProcess, sign: signal.Signals
) -> None:
    with GpuEngine(server.address, Mode.RING, model="m", transfer_s=2.0) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        engine.store(digests(6))
        (mover,) = movers_of(server)
        os.kill(mover, sign)
        for number in range(4):
            bad = engine.load(engine.lookup(digests(6), f"l{number}"), 128, request_id=f"l{number}")
            right = (engine.bytes_of(128, 6) == engine.bytes_of(0, 6)).all(axis=1)
            assert all(right[b - 128] for b in range(128, 128 + len(right)) if b not in bad)
            engine.blocks.memory[128:] = 0xA5
        until(
            # Until there is another one, the engine may not know yet that it lost this one.
            lambda: (now := movers_of(server)) and mover not in now and not engine.rings.reason,
            told=lambda: (
                f"ring: {engine.rings.reason or 'joined'}; movers {movers_of(server)}, of which {mover} was hurt"
            ),
        )

        keys = digests(6, "after")
        engine.store(keys, request_id="after")
        assert engine.load(engine.lookup(keys, "after"), 128, request_id="after") == frozenset()
        assert (engine.bytes_of(128, 6) == engine.bytes_of(0, 6)).all()


def test_a_restarted_server_serves_what_the_ring_stored(server: ServerProcess) -> None:
    with GpuEngine(server.address, Mode.RING, model="m") as engine:
        engine.healthy()
        engine.blocks.fill(1)
        engine.store(digests(6))
        epoch = engine.worker_link.state.epoch
        server.restart()
        until(
            lambda: engine.worker_link.state.epoch > epoch and not engine.rings.reason,
            told=lambda: f"{engine.worker_link.state}; ring: {engine.rings.reason or 'joined'}",
        )
        engine.healthy()

        assert engine.load(engine.lookup(digests(6), "again"), 128, request_id="again") == frozenset()
        assert (engine.bytes_of(128, 6) == engine.bytes_of(0, 6)).all()
