# SPDX-License-Identifier: Apache-2.0
"""Deaths and stops of an engine, its mover and its server at any time; the movers move real bytes between files."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.fakes.blocks import POISON
from tests.fakes.clients import CHUNK_BLOCKS, FakeEngine, digests, until
from tests.fakes.mapped_engine import MappedEngine
from tests.fakes.ring_engine import RingEngine
from tests.fakes.server_process import ROOT, WITH_FAKE_MOVERS, ServerProcess

from kvpool.model.identity import Mode
from kvpool.wire import messages as m

TARGET = 128
PATIENCE_S = 60.0


@pytest.fixture
def server(tmp_path):
    with ServerProcess(tmp_path, program=WITH_FAKE_MOVERS, leases={"store_s": 3.0, "lookup_s": 3.0}) as server:
        yield server


def movers_of(server):
    """Process ids of the server's movers."""
    children = Path(f"/proc/{server._process.pid}/task/{server._process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"mover_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def numbers(engine):
    return engine.scheduler_link.call(m.Stats())[0]


def joined(engine):
    until(lambda: not engine.rings.reason and engine.worker_link.state.mode in {Mode.RING, Mode.MAPPED}, PATIENCE_S)


def round_trip(engine, seed):
    """Store and load; whatever happens, no wrong byte is called good."""
    keys = digests(4, str(seed))
    engine.blocks.memory[TARGET:] = POISON
    engine.store(keys, request_id=f"s{seed}")
    answer = engine.lookup(keys, f"l{seed}")
    if not answer.chunks:
        return False
    bad = engine.load(answer, TARGET, request_id=f"l{seed}")
    for block in set(range(TARGET, TARGET + answer.chunks * CHUNK_BLOCKS)) - bad:
        assert (engine.blocks.memory[block] == engine.blocks.memory[block - TARGET]).all()
    return not bad


@pytest.mark.parametrize("kind", [RingEngine, MappedEngine])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_a_mover_that_dies_or_stands_still_at_any_time_is_replaced_and_costs_no_wrong_byte(server, sign, kind):
    chance = random.Random(5)
    with kind(server.address, model="m", transfer_s=1.0, request_s=2.0, lookup_s=2.0) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        for number in range(3):
            joined(engine)
            (mover,) = until(lambda: movers_of(server), PATIENCE_S)
            engine.begin_store(digests(6, f"under way {number}"), request_id=f"u{number}")
            ends_s = time.monotonic() + chance.uniform(0, 0.02)
            while time.monotonic() < ends_s:
                engine.poll()
            os.kill(mover, sign)
            round_trip(engine, f"hurt {number}")
            until(lambda gone=mover: gone not in movers_of(server), PATIENCE_S)
            joined(engine)
            assert until(lambda n=number: round_trip(engine, f"well {n}/{time.monotonic()}"), PATIENCE_S)
        engine.scheduler.end("l")
        until(lambda: numbers(engine).leases == 0 and numbers(engine).l1_pinned_bytes == 0, PATIENCE_S)


def test_the_reason_is_known_while_there_is_no_ring(server):
    with RingEngine(server.address, model="m") as engine:
        engine.healthy()
        engine.rings.current().retire("the test says so")
        until(lambda: "the test says so" in engine.rings.reason or not engine.rings.reason, PATIENCE_S)
        joined(engine)
        engine.blocks.fill(2)
        assert until(lambda: round_trip(engine, time.monotonic()), PATIENCE_S)


def test_a_restarted_server_starts_another_mover_and_serves_what_the_first_one_stored(server):
    with RingEngine(server.address, model="m", request_s=2.0) as engine:
        engine.healthy()
        engine.blocks.fill(4)
        engine.store(digests(4))
        before = movers_of(server)
        epoch = engine.worker_link.state.epoch
        server.restart()
        until(lambda: engine.worker_link.state.epoch > epoch, PATIENCE_S)
        joined(engine)

        assert not set(before) & set(movers_of(server))
        until(lambda: engine.scheduler_link.state.healthy, PATIENCE_S)
        engine.blocks.memory[TARGET:] = POISON
        assert engine.load(engine.lookup(digests(4), "again"), TARGET, request_id="again") == frozenset()
        assert (engine.bytes_of(TARGET, 4) == engine.bytes_of(0, 4)).all()


def test_a_device_that_the_mover_cannot_reach_leaves_another_way_with_the_reason(server):
    engine = RingEngine(server.address, model="m")
    engine.device.ring = msgspec.structs.replace(engine.device.ring, device=bytes(16))
    with engine:
        until(lambda: engine.worker_link.state.mode is Mode.STREAMED, PATIENCE_S)
        assert "no such device" in engine.rings.reason
        engine.blocks.fill(3)
        until(lambda: engine.scheduler_link.state.healthy, PATIENCE_S)
        assert until(lambda: round_trip(engine, time.monotonic()), PATIENCE_S)


CLIENT = """
import sys
from tests.fakes.clients import digests
from tests.fakes.mapped_engine import MappedEngine
from tests.fakes.ring_engine import RingEngine
kind = {"RingEngine": RingEngine, "MappedEngine": MappedEngine}[sys.argv[3]]
with kind(sys.argv[1], model="m") as engine:
    engine.healthy()
    engine.blocks.fill(1)
    print("ready", flush=True)
    for number in range(100000):
        engine.store(digests(6, f"{sys.argv[2]}/{number}"), request_id=f"s{number}")
"""


@pytest.mark.parametrize("kind", [RingEngine, MappedEngine])
def test_a_killed_engine_leaves_no_mover_no_lease_and_no_slot(server, kind):
    chance = random.Random(6)
    with FakeEngine(server.address, Mode.STREAMED, model="other") as other:
        other.healthy(PATIENCE_S)
        for number in range(3):
            env = os.environ | {"PYTHONPATH": f"{ROOT / 'cacheserver'}:{ROOT}"}
            command = [sys.executable, "-c", CLIENT, server.address, str(number), kind.__name__]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
                assert child.stdout.readline().strip() == "ready"
                ends_s = time.monotonic() + chance.uniform(0, 0.2)
                while time.monotonic() < ends_s:
                    other.poll()
                child.kill()
            until(lambda: not movers_of(server), PATIENCE_S)
            until(lambda: numbers(other).leases == 0, PATIENCE_S)
        other.scheduler_link.call(m.Clear(forced=True))
        until(lambda: numbers(other).l1_used_bytes == 0, PATIENCE_S)
