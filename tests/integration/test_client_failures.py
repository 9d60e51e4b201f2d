# SPDX-License-Identifier: Apache-2.0
"""Deaths, stops and restarts on both sides, with real processes."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from time import monotonic

import pytest
from tests.fakes.blocks import POISON
from tests.fakes.clients import CHUNK_BLOCKS, CHUNK_BYTES, FakeEngine, digests, engines, until
from tests.fakes.server_process import ROOT, ServerProcess

from kvpool.client.link import Link
from kvpool.config import ClientConfig
from kvpool.model.identity import ClientKind, Mode
from kvpool.wire import messages as m

KEYS = digests(3)
TARGET = 100
ALL_BLOCKS = frozenset(range(TARGET, TARGET + 3 * CHUNK_BLOCKS))


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture
def server(process):
    """The server, running whatever the last test did to it."""
    process.start()
    return process


@pytest.fixture(params=[Mode.CLIENT_MOVED, Mode.STREAMED], ids=str)
def mode(request):
    return request.param


@pytest.fixture
def engine(server, mode, request):
    """A healthy engine of this test's own namespace."""
    name = request.node.name
    with FakeEngine(server.address, mode, model=name, transfer_s=2.0, request_s=0.5, lookup_s=0.5) as engine:
        engine.healthy(30)
        engine.blocks.fill(1)
        yield engine


def again_healthy(engine, timeout_s=30):
    """Wait until both links are healthy."""
    until(lambda: engine.worker_link.state.healthy and engine.scheduler_link.state.healthy, timeout_s)


def numbers(engine):
    return engine.scheduler_link.call(m.Stats())[0]


@pytest.mark.behaviour("D062", "R127")
def test_a_killed_server_comes_back_with_its_chunks_and_the_engine_finds_it_by_itself(server, engine):
    engine.store(KEYS)
    boot_ids = {engine.worker_link.state.boot_id}
    server.kill()
    until(lambda: not engine.worker_link.state.healthy and not engine.scheduler_link.state.healthy, 1)
    assert engine.lookup(KEYS, "while it is gone").chunks == 0
    engine.blocks.memory[TARGET:] = POISON

    server.start()
    again_healthy(engine)

    assert engine.worker_link.state.boot_id not in boot_ids
    assert engine.load(engine.lookup(KEYS), TARGET) == frozenset()
    assert (engine.bytes_of(TARGET, 3) == engine.bytes_of(0, 3)).all()


@pytest.mark.behaviour("R068")
def test_restart_after_restart_the_engine_is_back_within_seconds_of_its_server(tmp_path, server, engine):
    for n in range(2):
        server.restart()
        again_healthy(engine)
        engine.store(digests(2, str(n)), request_id=f"s{n}")

        assert engine.lookup(digests(2, str(n)), f"l{n}").chunks == 2
    assert engine.worker_link.counters()["sessions"] >= 3


@pytest.mark.behaviour("D003", "D058", "D106")
def test_a_server_killed_in_the_middle_of_a_store_claims_and_shows_nothing(server, engine, mode):
    engine.blocks.gate.clear()
    engine.begin_store(KEYS)
    assert engine.blocks.entered.wait(5)
    server.restart()
    until(lambda: not engine.worker_link.state.healthy)
    if mode is Mode.CLIENT_MOVED:
        assert not engine.worker_link.wait_healthy(1), "no Hello while the copy into the server's memory runs"
    else:
        assert engine.worker_link.wait_healthy(30), "a copy into the client's own buffer is no business of the server"
    assert not engine.poll().stored, "its blocks are still read"
    assert engine.worker.has_stores("s")

    engine.blocks.gate.set()
    again_healthy(engine)
    until(lambda: engine.poll() and engine.stored)

    assert engine.worker.counters().get("chunks_stored", 0) == 0
    assert engine.lookup(KEYS).chunks == 0
    engine.store(KEYS, request_id="again")
    assert engine.lookup(KEYS, "again").chunks == 3


@pytest.mark.behaviour("D054", "R104")
def test_a_server_killed_in_the_middle_of_a_load_makes_it_bad(server, engine):
    engine.store(KEYS)
    answer = engine.lookup(KEYS)
    engine.blocks.gate.clear()
    engine.blocks.entered.clear()
    engine.begin_load(answer, TARGET)
    assert engine.blocks.entered.wait(5)

    server.kill()
    engine.blocks.gate.set()
    until(lambda: engine.poll() and engine.loaded, 5)

    assert engine.loaded == [("l", ALL_BLOCKS)]


@pytest.mark.behaviour("D055", "D052")
def test_a_stopped_server_costs_deadlines_and_no_more(server, engine):
    engine.store(KEYS)
    answer = engine.lookup(KEYS)
    server.stop()
    began_s = monotonic()

    engine.begin_load(answer, TARGET)
    engine.begin_store(digests(2, "other"), request_id="stopped")
    assert monotonic() - began_s < 0.2, "nothing waits in the engine's thread"
    assert engine.lookup(KEYS, "while stopped").chunks == 0
    assert monotonic() - began_s < 1.5
    until(lambda: engine.poll() and engine.loaded and "stopped" in engine.stored, 5)

    assert monotonic() - began_s < 3.5
    assert engine.loaded == [("l", ALL_BLOCKS)]
    until(lambda: not engine.worker_link.state.healthy, 5)
    server.go_on()
    again_healthy(engine)
    assert engine.load(engine.lookup(KEYS, "after"), TARGET) == frozenset()


@contextmanager
def hanging_client(server, mode, model):
    """A client process that is in the middle of its second chunk's gather."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.storing_client", server.address, str(mode), model],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'cacheserver'}:{ROOT}"},
    )
    try:
        assert process.stdout.readline() == b"in the middle\n"
        yield process
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


@pytest.mark.behaviour("D106", "D108")
def test_a_client_killed_in_the_middle_of_a_store_leaves_nothing_readable_and_nothing_held(
    server, engine, mode, request
):
    keys = digests(3, "killed")
    used = numbers(engine).l1_used_bytes
    with hanging_client(server, mode, request.node.name) as client:
        assert numbers(engine).leases > 0
        client.kill()
        client.wait(10)
        began_s = monotonic()
        until(lambda: numbers(engine).leases == 0, 5)

        until(lambda: numbers(engine).l1_used_bytes <= used, 5)
        assert monotonic() - began_s < 5
    assert engine.lookup(keys).chunks == 0
    engine.store(keys, request_id="ours")
    assert engine.lookup(keys, "ours").chunks == 3


def test_a_stopped_client_is_not_dead_and_goes_on_where_it_was(server, engine, mode, request):
    with hanging_client(server, mode, request.node.name) as client:
        client.send_signal(signal.SIGSTOP)
        silent_s = 2.0
        assert not engine.blocks.entered.wait(silent_s)
        clients = numbers(engine).clients
        client.send_signal(signal.SIGCONT)

        assert clients == 4
        assert engine.lookup(digests(3, "killed")).chunks == 0


@pytest.mark.behaviour("R016")
def test_of_two_writers_one_stores_and_the_other_waits_for_nothing(server, engine, mode, request):
    with FakeEngine(server.address, mode, model=request.node.name, lookup_s=5.0) as other:
        other.healthy(30)
        other.blocks.memory[:] = engine.blocks.memory
        engine.blocks.gate.clear()
        engine.begin_store(KEYS)
        assert engine.blocks.entered.wait(5)

        other.store(KEYS)
        assert other.worker.counters()["chunks_pending"] == 3
        other.scheduler.lookup("waits", KEYS)
        assert other.scheduler.answer("waits") is None
        engine.blocks.gate.set()
        answer = until(lambda: other.scheduler.answer("waits"))

        assert answer.chunks == 3, "chunks that were coming came"
        other.blocks.memory[TARGET:] = POISON
        assert other.load(answer, TARGET, request_id="waits") == frozenset()
        assert (other.bytes_of(TARGET, 3) == engine.bytes_of(0, 3)).all()


@pytest.mark.behaviour("D061")
def test_leases_die_with_their_connection(server, engine):
    engine.store(KEYS)
    config = ClientConfig(server=server.address)
    probe = Link(config, ClientKind.PROBE)
    probe.start()
    assert probe.wait_healthy(5)
    engine.lookup(KEYS)
    assert probe.call(m.Stats())[0].leases == 1

    # An equal registration begins a new session, without a goodbye, a FreeLookup or an EndRequest.
    old = engine.scheduler_link.registration
    engine.scheduler_link.registration = m.Register(
        namespace=old.namespace, groups=old.groups, shards=old.shards, modes=old.modes
    )

    until(lambda: probe.call(m.Stats())[0].leases == 0)
    probe.close()


@pytest.mark.behaviour("D107")
def test_a_client_maps_only_its_own_tenants_regions_and_read_only_unless_it_writes(server):
    with engines(FakeEngine(server.address, Mode.CLIENT_MOVED), FakeEngine(server.address, Mode.STREAMED)) as (a, b):
        a.store(KEYS)
        b.store(digests(1, "streamed"))
        a.load(a.lookup(KEYS), TARGET)
        segments = a.worker_link.segments
        (region, mapping), *_ = segments._readable.items()

        assert memoryview(mapping).readonly
        assert not memoryview(segments._writable[region]).readonly
        from kvpool.model.errors import CacheError

        regions = numbers(a).l1_bytes // len(mapping)
        for other in range(regions):
            if other != region:
                with pytest.raises(CacheError):
                    segments.reading(other, 0, CHUNK_BYTES)
