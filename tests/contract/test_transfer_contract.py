# SPDX-License-Identifier: Apache-2.0
"""What every way of moving bytes owes: one suite, run over each of them against a real server."""

import os

import numpy as np
import pytest
from tests.fakes.blocks import POISON
from tests.fakes.clients import CHUNK_BLOCKS, CHUNK_BYTES, FakeEngine, digests, engines, until
from tests.fakes.mapped_engine import MappedEngine
from tests.fakes.ring_engine import RingEngine
from tests.fakes.server_process import WITH_FAKE_MOVERS, ServerProcess

from kvpool.client.jobs import LoadJob, StoreJob
from kvpool.model.checksum import PREFERRED, checksum
from kvpool.model.identity import Mode
from kvpool.model.slots import Disposition
from kvpool.wire import messages as m
from kvpool.wire.codec import flags_of, placements_of

WAYS = (Mode.CLIENT_MOVED, Mode.STREAMED, Mode.RING, Mode.MAPPED)
MOVERS = (Mode.RING, Mode.MAPPED)
BLOCKS = 512
TARGET = 256
LEASE_S = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # Frames smaller than a chunk, so that streamed chunks come in pieces, the last of them short.
    limits = {"frame_bytes": (64 << 10) + 4096, "bulk_window": 3}
    leases = {"lookup_s": LEASE_S, "store_s": LEASE_S}
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, program=WITH_FAKE_MOVERS, limits=limits, leases=leases) as server:
        yield server


@pytest.fixture(params=WAYS, ids=str)
def way(request):
    return request.param


@pytest.fixture
def new_engine(server, way, request):
    """Makes an engine of this test's own namespace."""

    def make(mode=way, **options):
        kind = {Mode.RING: RingEngine, Mode.MAPPED: MappedEngine}.get(mode, FakeEngine)
        return kind(server.address, mode, blocks=BLOCKS, model=request.node.name, **options)

    return make


@pytest.fixture
def engine(new_engine):
    with new_engine() as engine:
        engine.healthy()
        engine.blocks.fill(1)
        yield engine


def poison(engine, first=TARGET):
    engine.blocks.memory[first:] = POISON


def scattered_ids(chunks, seed, low=0, high=TARGET):
    """Distinct block ids without any order."""
    picked = np.random.default_rng(seed).permutation(np.arange(low, high))[: chunks * CHUNK_BLOCKS]
    return picked.reshape(chunks, CHUNK_BLOCKS).astype(np.int64)


def store_ids(engine, keys, ids, first=0, parent=b""):
    job = StoreJob(request_id="s", group=0, shard=0, first=first, parent=parent, digests=keys, block_ids=ids)
    job.ready.set()
    before = len(engine.stored)
    engine.worker.store(job)
    until(lambda: engine.poll() and len(engine.stored) > before)


def load_ids(engine, answer, ids, **options):
    fields = {"request_id": "l", "group": 0, "shard": 0, "first": 0, "end": len(ids)} | options
    before = len(engine.loaded)
    engine.worker.load(LoadJob(lookup_id=answer.lookup_id, block_ids=ids, **fields))
    until(lambda: engine.poll() and len(engine.loaded) > before)
    return engine.loaded[-1][1]


def blocks_of(ids):
    return frozenset(ids.reshape(-1).tolist())


@pytest.mark.behaviour("R037")
def test_bytes_come_back_to_other_blocks_and_to_no_others(engine):
    keys, sources = digests(6), scattered_ids(6, seed=1)
    targets = scattered_ids(6, seed=2, low=TARGET, high=BLOCKS)
    poison(engine)

    store_ids(engine, keys, sources)
    bad = load_ids(engine, engine.lookup(keys), targets)

    assert bad == frozenset()
    assert (engine.blocks.memory[targets.reshape(-1)] == engine.blocks.memory[sources.reshape(-1)]).all()
    others = sorted(set(range(TARGET, BLOCKS)) - blocks_of(targets))
    assert (engine.blocks.memory[others] == POISON).all()


def test_each_chunk_has_its_own_bytes(engine):
    """The same chunks loaded one by one, backwards, are what was stored under their digests."""
    keys = digests(5)
    engine.store(keys)
    answer = engine.lookup(keys)
    poison(engine)

    for chunk in reversed(range(5)):
        assert engine.load(answer, TARGET + chunk * CHUNK_BLOCKS, first=chunk, chunks=1) == frozenset()

    assert (engine.bytes_of(TARGET, 5) == engine.bytes_of(0, 5)).all()


@pytest.mark.behaviour("D109")
def test_what_was_stored_is_found_at_once(engine):
    for n in range(5):
        keys = digests(2, str(n))
        engine.store(keys)

        assert engine.lookup(keys, str(n)).chunks == 2


@pytest.mark.behaviour("R003")
@pytest.mark.parametrize("block_bytes", [8, 512, 12_345])
def test_chunks_of_any_size(new_engine, block_bytes):
    with new_engine(block_bytes=block_bytes) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        keys = digests(3, str(block_bytes))
        poison(engine)

        engine.store(keys)

        assert engine.load(engine.lookup(keys), TARGET) == frozenset()
        assert (engine.bytes_of(TARGET, 3) == engine.bytes_of(0, 3)).all()


def sent_chunks(engine, way):
    """How many chunks went to the server. A ring may gather some in vain, while the server looks what it has."""
    if way is not Mode.RING:
        return engine.blocks.gathered
    counters = engine.scheduler_link.call(m.Stats())[0].counters
    return counters['kvpool_ring_bytes_total{direction="store"}'] / (engine.blocks.memory[:CHUNK_BLOCKS].nbytes)


@pytest.mark.behaviour("R016", "R017")
def test_what_is_there_already_is_not_sent_again(engine, way):
    keys = digests(6)
    engine.store(keys[:64])
    engine.store(keys[96:128], 3 * CHUNK_BLOCKS)  # chunk 3 alone
    sent = sent_chunks(engine, way)

    engine.store(keys)

    assert sent_chunks(engine, way) - sent == 3
    assert engine.worker.counters()["chunks_present"] == 3
    poison(engine)
    assert engine.load(engine.lookup(keys), TARGET) == frozenset()
    assert (engine.bytes_of(TARGET, 6) == engine.bytes_of(0, 6)).all()


@pytest.mark.behaviour("R010")
def test_a_range_in_the_middle_of_a_prompt(engine):
    keys = digests(6)
    engine.store(keys[:64])
    ids = scattered_ids(4, seed=4)

    store_ids(engine, keys[64:], ids, first=2, parent=keys[32:64])
    answer = engine.lookup(keys)
    poison(engine)
    targets = scattered_ids(3, seed=5, low=TARGET, high=BLOCKS)
    bad = load_ids(engine, answer, targets, first=3, end=6)

    assert (answer.chunks, bad) == (6, frozenset())
    assert (engine.blocks.memory[targets.reshape(-1)] == engine.blocks.memory[ids[1:].reshape(-1)]).all()


@pytest.mark.parametrize("skip", [1, CHUNK_BLOCKS - 1, CHUNK_BLOCKS, CHUNK_BLOCKS + 3, 3 * CHUNK_BLOCKS])
@pytest.mark.behaviour("R032", "R033")
def test_blocks_that_are_skipped_are_never_written(engine, skip):
    keys = digests(3)
    engine.store(keys)
    poison(engine)

    bad = engine.load(engine.lookup(keys), TARGET, skip_blocks=skip)

    assert bad == frozenset()
    assert (engine.blocks.memory[TARGET : TARGET + skip] == POISON).all()
    assert (engine.blocks.memory[TARGET + skip : TARGET + 3 * CHUNK_BLOCKS] == engine.bytes_of(0, 3)[skip:]).all()


@pytest.mark.behaviour("R028")
def test_a_load_of_a_lookup_that_ended_reports_its_blocks(engine):
    keys = digests(3)
    engine.store(keys)
    answer = engine.lookup(keys)
    poison(engine)
    engine.scheduler.end("l")
    until(lambda: leases(engine) == 0)

    bad = engine.load(answer, TARGET, skip_blocks=2)

    assert bad == frozenset(range(TARGET + 2, TARGET + 3 * CHUNK_BLOCKS))
    assert (engine.blocks.memory[TARGET : TARGET + 2] == POISON).all()


def judged(engine, way, chunks, name):
    """What came of a load whose chunks went away before they reached their blocks: all of them are bad.

    A ring's mover has read them by then. If the server had vouched for that before, they are what was stored.
    """
    (bad,) = [blocks for request, blocks in engine.loaded if request == name]
    if way is Mode.RING and not bad:
        assert (engine.bytes_of(TARGET, chunks) == engine.bytes_of(0, chunks)).all()
    else:
        assert bad == frozenset(range(TARGET, TARGET + chunks * CHUNK_BLOCKS))


@pytest.mark.behaviour("D010")
def test_a_lease_that_runs_out_under_a_load_makes_it_bad(engine, way):
    keys = digests(3)
    engine.store(keys)
    answer = engine.lookup(keys)
    engine.blocks.gate.clear()
    engine.begin_load(answer, TARGET)
    assert engine.blocks.entered.wait(5)
    until(lambda: leases(engine) == 0)

    engine.blocks.gate.set()
    until(lambda: engine.poll() and engine.loaded)

    judged(engine, way, 3, "l")


@pytest.mark.behaviour("D024")
def test_a_forced_clear_under_a_load_makes_it_bad(engine, way, request):
    keys = digests(2)
    engine.store(keys)
    answer = engine.lookup(keys)
    engine.blocks.gate.clear()
    engine.blocks.entered.clear()
    engine.begin_load(answer, TARGET)
    assert engine.blocks.entered.wait(5)

    engine.scheduler_link.call(m.Clear(model=request.node.name, forced=True))
    engine.blocks.gate.set()
    until(lambda: engine.poll() and engine.loaded)

    judged(engine, way, 2, "l")


@pytest.mark.behaviour("R019", "D108")
def test_a_store_whose_lease_ran_out_is_not_claimed_nor_found(engine):
    keys = digests(2)
    engine.blocks.gate.clear()
    engine.begin_store(keys)
    assert engine.blocks.entered.wait(5)
    until(lambda: leases(engine) == 1)  # a ring gathers before the server has answered
    until(lambda: leases(engine) == 0)

    engine.blocks.gate.set()
    until(lambda: engine.poll() and engine.stored)

    assert "chunks_stored" not in engine.worker.counters()
    assert engine.lookup(keys).chunks == 0


def test_bytes_whose_checksum_is_wrong_are_not_written_and_not_found_again(engine, way, new_engine):
    keys = digests(3)
    engine.store(keys[:32])
    # Of what a mover moves it makes the checksums; what others stored is verified on its way to one, too.
    way = Mode.STREAMED if way in MOVERS else way
    with engines(new_engine(way)) as (writer,):
        writer.blocks.memory[:] = engine.blocks.memory
        store_with_checksums(writer, way, keys, [1, 2], wrong=[1])
    answer = engine.lookup(keys)
    poison(engine)

    bad = engine.load(answer, TARGET)

    assert answer.chunks == 3
    assert bad == frozenset(range(TARGET + CHUNK_BLOCKS, TARGET + 2 * CHUNK_BLOCKS))
    assert (engine.bytes_of(TARGET + CHUNK_BLOCKS, 1) == POISON).all()
    assert (engine.bytes_of(TARGET, 1) == engine.bytes_of(0, 1)).all()
    assert engine.lookup(keys, "again").chunks == 1


def test_a_store_that_breaks_off_gives_its_slots_back(engine, way):
    used = statistics(engine).l1_used_bytes
    keys = digests(3)

    engine.store(keys, BLOCKS - 2 * CHUNK_BLOCKS)  # the third chunk's blocks do not exist

    # A mover is handed all chunks at once: they are refused together.
    assert engine.lookup(keys).chunks == (0 if way in MOVERS else 2)
    engine.scheduler.end("l")
    until(lambda: leases(engine) == 0)
    assert statistics(engine).l1_used_bytes - used <= 3 * CHUNK_BYTES
    engine.store(keys)
    assert engine.lookup(keys, "again").chunks == 3, "nobody holds the third chunk"


@pytest.mark.behaviour("R007")
def test_two_engines_share_chunks(new_engine):
    with engines(new_engine(), new_engine()) as (writer, reader):
        writer.blocks.fill(3)
        keys = digests(4)
        writer.store(keys)

        assert reader.load(reader.lookup(keys), TARGET) == frozenset()
        assert (reader.bytes_of(TARGET, 4) == writer.bytes_of(0, 4)).all()


@pytest.mark.parametrize("other", WAYS, ids=str)
def test_chunks_of_another_mode_can_be_loaded(new_engine, other):
    with engines(new_engine(), new_engine(other)) as (reader, writer):
        writer.blocks.fill(3)
        keys = digests(4)
        writer.store(keys[:64])
        reader.blocks.memory[:TARGET] = writer.blocks.memory[:TARGET]
        reader.store(keys)

        assert reader.load(reader.lookup(keys), TARGET) == frozenset()
        assert (reader.bytes_of(TARGET, 4) == writer.bytes_of(0, 4)).all()


def test_loads_and_stores_at_once_keep_their_bytes(engine):
    keys = [digests(4, str(n)) for n in range(6)]
    for n in range(3):
        engine.store(keys[n], n * 4 * CHUNK_BLOCKS, request_id=f"s{n}")
    poison(engine)
    for n in range(3):
        engine.begin_load(engine.lookup(keys[n], f"l{n}"), TARGET + n * 4 * CHUNK_BLOCKS, request_id=f"l{n}")
        engine.begin_store(keys[3 + n], (3 + n) * CHUNK_BLOCKS, request_id=f"s{3 + n}")

    until(lambda: engine.poll() and len(engine.loaded) == 3 and len(engine.stored) == 6)

    assert all(bad == frozenset() for _, bad in engine.loaded)
    assert (engine.bytes_of(TARGET, 12) == engine.bytes_of(0, 12)).all()


def statistics(engine):
    return engine.scheduler_link.call(m.Stats())[0]


def leases(engine):
    return statistics(engine).leases


def store_with_checksums(engine, way, keys, chunks, wrong):
    """Store as the adapter does, but with the checksums of other bytes for *wrong*."""
    link, store_id = engine.worker_link, os.urandom(16)
    asked = b"".join(keys[c * 32 : c * 32 + 32] for c in chunks)
    prepare = m.PrepareStore(request_id="x", store_id=store_id, first=chunks[0], parent=keys[:32])
    rows = placements_of(link.call(prepare, (asked,))[1][0], len(chunks))
    sums = b""
    for i, chunk in enumerate(chunks):
        assert rows[i]["disposition"] == Disposition.WRITE
        data = engine.bytes_of(chunk * CHUNK_BLOCKS, 1).tobytes()
        if way is Mode.STREAMED:
            step = link.state.welcome.limits.frame_bytes
            for at in range(0, len(data), step):
                piece = m.WriteChunk(store_id=store_id, chunk=chunk, offset=at)
                link.submit(piece, (data[at : at + step],), bulk=True).result()
        else:
            part = (int(rows[i]["memory"]), int(rows[i]["offset"]), int(rows[i]["length"]))
            link.segments.writing(*part)[:] = data
        sums += checksum(b"other bytes" if chunk in wrong else data)
    commit = m.CommitStore(store_id=store_id, checksum_kind=PREFERRED)
    ends = flags_of(link.call(commit, (b"\1" * len(chunks), sums))[1][0], len(chunks))
    assert (ends == Disposition.STORED).all()
