# SPDX-License-Identifier: Apache-2.0
"""Bytes that change in the server's memory after they went through a ring: movers with real bytes and real files."""

import pytest
from tests.fakes.blocks import POISON
from tests.fakes.clients import CHUNK_BLOCKS, FakeEngine, digests, engines, until
from tests.fakes.ring_engine import RingEngine
from tests.fakes.server_process import WITH_FAKE_MOVERS, ServerProcess

from kvpool.model.identity import Mode
from kvpool.wire import messages as m

TARGET = 128
PATIENCE_S = 60.0
MADE = 'kvpool_ring_checksums_total{direction="store"}'
VERIFIED = 'kvpool_ring_checksums_total{direction="load"}'
MISMATCHES = "kvpool_checksum_mismatches_total"


@pytest.fixture
def new_server(tmp_path):
    """Starts a server with shares of chunks stored with a checksum and of loads that are verified."""
    servers = []

    def make(checksums, verify_loads):
        server = ServerProcess(
            tmp_path, program=WITH_FAKE_MOVERS, l1={"verify_loads": verify_loads}, mover={"checksums": checksums}
        )
        servers.append(server)
        server.start()
        return server

    yield make
    for server in servers:
        server.kill()


def joined(engine):
    def of_this_session():
        state = engine.worker_link.state
        return state.mode is Mode.RING and engine.rings._served == state.epoch and engine.rings.current()

    until(of_this_session, PATIENCE_S)
    until(lambda: not engine.rings.reason, PATIENCE_S)
    until(lambda: engine.scheduler_link.state.healthy, PATIENCE_S)


def counters(engine):
    return engine.scheduler_link.call(m.Stats())[0].counters


def spoil(server, engine, chunk):
    """Turn over one byte of the place where a chunk lies in the arena's files."""
    data = engine.bytes_of(chunk * CHUNK_BLOCKS, 1).tobytes()
    for path in (server.folder / "l1").rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(data)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(data) - 5)
                file.write(bytes([data[-5] ^ 0x10]))
            return
    raise AssertionError("the chunk is in no file")


def load(engine, keys, name):
    """Load over poison; returns the chunks that were found and those that were lost, and checks all the others."""
    engine.blocks.memory[TARGET:] = POISON
    answer = engine.lookup(keys, name)
    bad = engine.load(answer, TARGET, request_id=name)
    lost = {(block - TARGET) // CHUNK_BLOCKS for block in bad}
    assert len(bad) == len(lost) * CHUNK_BLOCKS
    for chunk in range(answer.chunks):
        found = engine.bytes_of(TARGET + chunk * CHUNK_BLOCKS, 1)
        expected = POISON if chunk in lost else engine.bytes_of(chunk * CHUNK_BLOCKS, 1)
        assert (found == expected).all()
    return answer.chunks, lost


def test_a_byte_that_changed_in_memory_is_a_miss_and_never_found_again(new_server):
    server = new_server(1.0, 1.0)
    with RingEngine(server.address, model="m") as engine:
        joined(engine)
        engine.blocks.fill(1)
        keys = digests(6)
        engine.store(keys)
        assert load(engine, keys, "well") == (6, set())
        spoil(server, engine, 3)

        assert load(engine, keys, "hurt") == (6, {3})

        assert load(engine, keys, "again") == (3, set())
        until(lambda: counters(engine)[VERIFIED] == 15, PATIENCE_S)
        assert counters(engine)[MADE] == 6
        assert counters(engine)[MISMATCHES] == 1, "the client's word and the mover's are one"
        assert engine.worker.counters()["chunks_checksum_wrong"] == 1
        engine.store(keys)
        assert load(engine, keys, "healed") == (6, set())


def test_a_restarted_server_verifies_what_it_finds_before_an_engine_gets_it(new_server):
    """No load is sampled: that these are verified is because nobody vouches for what a former server left."""
    server = new_server(1.0, 0.0)
    with RingEngine(server.address, model="m", request_s=2.0) as engine:
        joined(engine)
        engine.blocks.fill(2)
        keys = digests(5)
        engine.store(keys)
        assert load(engine, keys, "before") == (5, set())
        assert counters(engine)[VERIFIED] == 0
        engine.scheduler.end("before")
        epoch = engine.worker_link.state.epoch
        server.kill()
        spoil(server, engine, 4)
        server.start()
        until(lambda: engine.worker_link.state.epoch > epoch, PATIENCE_S)
        joined(engine)

        assert load(engine, keys, "first") == (5, {4})
        assert load(engine, keys, "second") == (4, set())

        until(lambda: counters(engine)[VERIFIED] == 5, PATIENCE_S)


@pytest.mark.parametrize(("checksums", "made"), [(0.0, 0), (0.25, 2), (0.5, 4)])
def test_chunks_with_and_without_a_checksum_are_loaded_together(new_server, checksums, made):
    server = new_server(checksums, 1.0)
    with RingEngine(server.address, model="m") as engine:
        joined(engine)
        engine.blocks.fill(3)
        keys = digests(8)
        engine.store(keys)

        assert load(engine, keys, "l") == (8, set())

        until(lambda: counters(engine)['kvpool_ring_bytes_total{direction="load"}'] > 0, PATIENCE_S)
        assert counters(engine)[MADE] == counters(engine)[VERIFIED] == made


def test_what_a_ring_stored_is_verified_by_an_engine_without_one(new_server):
    server = new_server(1.0, 1.0)
    reader = FakeEngine(server.address, Mode.STREAMED, model="m")
    with engines(RingEngine(server.address, model="m"), reader) as (writer, reader):
        joined(writer)
        writer.blocks.fill(4)
        reader.blocks.memory[:] = writer.blocks.memory
        keys = digests(4)
        writer.store(keys)
        spoil(server, writer, 2)

        assert load(reader, keys, "l") == (4, {2})

        assert reader.worker.counters()["chunks_checksum_wrong"] == 1
