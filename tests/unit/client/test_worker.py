# SPDX-License-Identifier: Apache-2.0
"""Jobs of the worker's adapter against a scripted server, in both modes."""

import logging
import threading
from time import monotonic

import numpy as np
import pytest
from tests.fakes.blocks import POISON
from tests.fakes.clients import CHUNK_BLOCKS, FakeEngine, digests, until
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.tiny_engine import TinyEngine

from kvpool.client.jobs import Answer, LoadJob, StoreJob
from kvpool.model import errors
from kvpool.model.identity import Mode, Role
from kvpool.model.slots import Disposition
from kvpool.wire import messages as m

KEYS = digests(3)
TARGET = 100
SOME = Answer(3, bytes(16))
STORE_STEPS = [m.PrepareStore, m.WriteChunk, m.CommitStore]
LOAD_STEPS = [m.PrepareRetrieve, m.ReadChunk, m.CommitRetrieve]
STREAMED_ALONE = (m.WriteChunk, m.ReadChunk)


def cases(steps):
    """Each step in each mode that has it."""
    both = [(mode, step) for mode in (Mode.CLIENT_MOVED, Mode.STREAMED) for step in steps]
    used = [(mode, step) for mode, step in both if mode is Mode.STREAMED or step not in STREAMED_ALONE]
    return pytest.mark.parametrize(("mode", "step"), used, ids=[f"{mode}-{step.__name__}" for mode, step in used])


def target_blocks(chunks=3, skip=0):
    return frozenset(range(TARGET + skip, TARGET + chunks * CHUNK_BLOCKS))


def stored(engine):
    return engine.worker.counters().get("chunks_stored", 0)


def untouched(engine, first=TARGET, blocks=3 * CHUNK_BLOCKS):
    """Give blocks their poison back, to see later that nothing was written."""
    engine.blocks.memory[first : first + blocks] = POISON


@pytest.mark.behaviour("R019")
def test_what_was_stored_comes_back(engine):
    untouched(engine)

    engine.store(KEYS)
    answer = engine.lookup(KEYS)
    bad = engine.load(answer, TARGET)

    assert (answer.chunks, bad) == (3, frozenset())
    assert (engine.bytes_of(TARGET, 3) == engine.bytes_of(0, 3)).all()
    assert stored(engine) == 3


@pytest.mark.behaviour("R098", "D053")
def test_uncached_a_store_is_dropped_and_a_load_reports_its_blocks(tmp_path):
    with FakeEngine(f"ipc://{tmp_path}/none") as engine:
        engine.store(KEYS)
        bad = engine.load(SOME, TARGET, chunks=3, skip_blocks=3)

        assert bad == target_blocks(skip=3)
        assert engine.worker.counters() == {"stores_dropped_uncached": 1, "loads_failed_uncached": 1}


@pytest.mark.behaviour("R099")
def test_the_question_goes_out_at_once_and_the_gather_waits_for_the_blocks(server, engine):
    job = engine.begin_store(KEYS, ready=False)

    server.wait_seen(m.PrepareStore)
    assert not engine.blocks.entered.wait(0.1)
    assert engine.worker.has_stores("s")

    job.ready.set()
    until(lambda: engine.poll() and engine.stored)
    assert stored(engine) == 3


@pytest.mark.behaviour("R019")
def test_a_store_whose_blocks_never_get_ready_ends_in_time_and_holds_up_no_other(server, engine):
    began_s = monotonic()
    engine.begin_store(KEYS, ready=False, request_id="never")
    engine.store(digests(2, "other"), 40, request_id="other")
    assert monotonic() - began_s < 0.9

    until(lambda: engine.poll() and "never" in engine.stored, 5)

    assert monotonic() - began_s < 2.5
    assert engine.worker.counters()["stores_dropped_late"] == 1
    server.wait_seen(m.CommitStore, 2)
    assert not any(client.stores for client in server.engine.clients.values()), "its slots were given back"


@pytest.mark.behaviour("D056", "D057", "R101", "R102")
def test_a_request_is_done_only_when_its_last_store_is(server, engine):
    first = engine.begin_store(KEYS, ready=False)
    second = engine.begin_store(digests(2, "more"), 40, ready=False)
    first.ready.set()
    until(lambda: stored(engine) == 3)

    assert engine.poll().stored == frozenset()
    assert engine.worker.has_stores("s")

    second.ready.set()
    until(lambda: engine.poll() and engine.stored)
    assert engine.stored == ["s"]
    assert not engine.worker.has_stores("s")


@pytest.mark.behaviour("R103", "R131", "D060")
def test_each_end_is_told_once_and_an_id_can_be_used_again(engine):
    for _ in range(3):
        engine.store(KEYS)
    engine.load(engine.lookup(KEYS), TARGET)

    assert engine.stored == ["s", "s", "s"]
    assert engine.loaded == [("l", frozenset())]
    assert engine.poll() == engine.poll()


def test_loads_of_one_request_are_told_together(engine):
    engine.store(KEYS)
    answer = engine.lookup(KEYS)
    engine.blocks.gate.clear()
    engine.begin_load(answer, TARGET, chunks=2)
    engine.begin_load(answer, 200, first=2, chunks=1)
    assert engine.poll().loaded == {}

    engine.blocks.gate.set()
    until(lambda: engine.poll() and engine.loaded)

    assert engine.loaded == [("l", frozenset())]


@pytest.mark.behaviour("R133")
def test_a_cancelled_store_reads_no_block_any_more(server, engine):
    server.hold(m.CommitStore)
    engine.blocks.gate.clear()
    engine.begin_store(KEYS, request_id="running")
    engine.begin_store(digests(2, "q"), 40, request_id="queued")
    assert engine.blocks.entered.wait(5)

    assert not engine.worker.cancel_stores(["running", "queued"], 0.05), "a gather still runs"
    engine.blocks.gate.set()
    assert engine.worker.cancel_stores(["running", "queued"], 5)

    gathered = engine.blocks.gathered
    until(lambda: engine.poll() and sorted(engine.stored) == ["queued", "running"], 5)
    assert engine.blocks.gathered == gathered == 1


def test_stores_that_must_not_read_any_more_get_some_time_first(server, engine):
    quick = engine.begin_store(KEYS, request_id="quick")
    assert engine.worker.settle_stores([quick], 5, 5)
    assert quick.gathered.is_set()
    assert engine.blocks.gathered == 3

    server.hold(m.PrepareStore)
    late = engine.begin_store(digests(2, "q"), 40, request_id="late")
    assert engine.worker.settle_stores([quick, late], 0.05, 5)

    assert late.gathered.is_set()
    until(lambda: engine.poll() and "late" in engine.stored, 5)
    assert engine.blocks.gathered == 3, "its server did not answer in time"


def test_a_gather_that_runs_on_is_not_settled(server, engine):
    engine.blocks.gate.clear()
    running = engine.begin_store(KEYS, request_id="running")
    assert engine.blocks.entered.wait(5)

    assert not engine.worker.settle_stores([running], 0.05, 0.05)
    engine.blocks.gate.set()


def test_cancelling_does_not_wait_for_a_stalled_server(server):
    with FakeEngine(server.address, Mode.STREAMED) as engine:
        engine.healthy()
        server.hold(m.WriteChunk, 1000)
        engine.begin_store(digests(20))
        server.wait_seen(m.WriteChunk, 4)
        began_s = monotonic()

        assert engine.worker.cancel_stores(["s"], 5)

        assert monotonic() - began_s < 1
        server.stop()


def test_chunks_gathered_before_a_cancel_are_kept(server, engine):
    engine.store(KEYS)
    assert engine.worker.cancel_stores(["s", "unknown"], 1)

    assert engine.lookup(KEYS).chunks == 3


def test_the_queues_are_bounded(server):
    server.drop(m.PrepareStore, 100)
    server.drop(m.PrepareRetrieve, 100)
    with FakeEngine(server.address, queue_jobs=2, transfer_s=30) as engine:
        engine.healthy()
        for i in range(4):
            engine.begin_store(KEYS, request_id=f"s{i}")
            engine.begin_load(SOME, TARGET, request_id=f"l{i}")
        engine.poll()

        assert engine.stored == ["s2", "s3"]
        assert sorted(engine.loaded) == [("l2", target_blocks()), ("l3", target_blocks())]
        assert engine.worker.counters()["stores_dropped_queue"] == 2
        assert engine.worker.counters()["loads_failed_queue"] == 2


@pytest.mark.parametrize("ids", [[[1, 2], [2, 3]], [[-2, 0], [1, 2]], [[1, 2]], [1, 2]], ids=str)
@pytest.mark.behaviour("D065")
def test_tables_of_blocks_that_make_no_sense_are_refused_before_anything_moves(server, engine, ids):
    job = StoreJob(
        request_id="s",
        group=0,
        shard=0,
        first=0,
        parent=b"",
        digests=digests(2),
        block_ids=np.array(ids, dtype=np.int64),
    )
    job.ready.set()

    engine.worker.store(job)

    assert engine.poll().stored == {"s"}
    assert engine.worker.counters() == {"stores_dropped_malformed": 1}
    assert not server.of(m.PrepareStore)


@pytest.mark.parametrize("ids", [[[1, 2], [2, 3]], [[-2, 0], [1, 2]], [[1, 2]]], ids=str)
@pytest.mark.behaviour("D065")
def test_nor_is_a_load_into_such_a_table_asked_for(server, engine, ids):
    blocks = np.array(ids, dtype=np.int64)
    engine.worker.load(LoadJob(request_id="l", lookup_id=b"l" * 16, group=0, shard=0, first=0, end=2, block_ids=blocks))

    assert list(engine.poll().loaded) == ["l"]
    assert engine.worker.counters() == {"loads_failed_malformed": 1}
    assert not server.of(m.PrepareRetrieve)


class Moment:
    """Where the engine's device is going to be."""

    event = 7

    def __init__(self):
        self.asked, self.reached = threading.Event(), threading.Event()

    def wait(self):
        self.asked.set()
        assert self.reached.wait(20)


@pytest.mark.behaviour("D001")
def test_a_load_writes_nothing_before_the_last_step_that_may_read_its_blocks(engine):
    engine.store(KEYS)
    answer, before, moment = engine.lookup(KEYS), engine.bytes_of(TARGET, 3), Moment()
    engine.begin_load(answer, TARGET, after=moment)

    assert moment.asked.wait(5)
    assert (engine.bytes_of(TARGET, 3) == before).all()
    moment.reached.set()

    until(lambda: engine.poll() and engine.loaded)
    assert engine.loaded == [("l", frozenset())]
    assert (engine.bytes_of(TARGET, 3) == engine.bytes_of(0, 3)).all()


@pytest.mark.behaviour("R014")
def test_a_store_reads_nothing_before_the_step_that_writes_its_blocks(engine):
    engine.blocks.entered.clear()
    moment = Moment()
    job = engine.begin_store(KEYS, ready=False)
    job.after = moment
    job.ready.set()
    engine.poll()

    assert moment.asked.wait(5)
    assert not engine.blocks.entered.is_set()
    engine.blocks.fill(9)
    moment.reached.set()

    until(lambda: engine.poll() and engine.stored)
    assert engine.load(engine.lookup(KEYS), TARGET) == frozenset()
    assert (engine.bytes_of(TARGET, 3) == engine.bytes_of(0, 3)).all()


def test_a_block_that_is_not_there_costs_its_store_but_not_the_thread(engine, caplog):
    engine.store(KEYS, 256 - 2 * CHUNK_BLOCKS)

    assert engine.stored == ["s"]
    assert stored(engine) == 2
    assert engine.lookup(KEYS).chunks == 2, "what was gathered before is kept, the rest is not claimed"
    engine.store(KEYS)
    assert engine.lookup(KEYS, "again").chunks == 3


@pytest.mark.behaviour("R037")
def test_a_scatter_that_fails_makes_its_load_bad(engine, caplog):
    engine.store(KEYS)
    answer = engine.lookup(KEYS)

    bad = engine.load(answer, 256 - 2 * CHUNK_BLOCKS)

    assert bad == frozenset(range(256 - 2 * CHUNK_BLOCKS, 256 + CHUNK_BLOCKS))


@pytest.mark.parametrize(
    ("role", "what"), [(Role.CONSUMER, "stores_dropped_role"), (Role.PRODUCER, "loads_failed_role")]
)
def test_roles_are_kept(server, role, what):
    with FakeEngine(server.address, role=role) as engine:
        engine.healthy()
        engine.store(KEYS)
        engine.load(SOME, TARGET)

        assert engine.worker.counters()[what] == 1
        assert engine.lookup(KEYS).chunks == 0


@cases(STORE_STEPS)
@pytest.mark.parametrize("how", ["die_at", "reboot_at", "drop"])
@pytest.mark.behaviour("R019", "R104", "D003", "D106")
def test_a_store_interrupted_at_any_step_ends_once_and_claims_nothing(server, engine, step, how):
    getattr(server, how)(step)
    began_s = monotonic()

    engine.store(KEYS)

    assert monotonic() - began_s < 3
    if how != "drop" or step is not m.WriteChunk:
        assert stored(engine) == 0
    else:
        assert stored(engine) < 3
    until(lambda: not engine.worker.has_stores("s"))
    assert engine.stored == ["s"]


@cases(LOAD_STEPS)
@pytest.mark.parametrize("how", ["die_at", "reboot_at"])
@pytest.mark.behaviour("D054", "D053", "R104")
def test_a_load_interrupted_at_any_step_reports_all_its_blocks(server, engine, step, how):
    engine.store(KEYS)
    answer = engine.lookup(KEYS)
    untouched(engine)
    getattr(server, how)(step)
    began_s = monotonic()

    bad = engine.load(answer, TARGET, skip_blocks=5)

    assert bad == target_blocks(skip=5)
    assert monotonic() - began_s < 3
    assert engine.loaded == [("l", bad)]
    assert (engine.blocks.memory[TARGET : TARGET + 5] == POISON).all()


@cases(LOAD_STEPS)
@pytest.mark.behaviour("D055")
def test_a_load_without_an_answer_ends_within_its_time(server, engine, step):
    engine.store(KEYS)
    answer = engine.lookup(KEYS)
    server.drop(step, 100)
    began_s = monotonic()

    bad = engine.load(answer, TARGET)

    assert 0.5 < monotonic() - began_s < 2.5
    assert bad == target_blocks()


@pytest.mark.behaviour("R099")
@cases(STORE_STEPS + LOAD_STEPS)
@pytest.mark.parametrize(
    "error", [errors.StaleBoot("x"), errors.NotRegistered("x"), errors.UnknownLease("x"), errors.Busy("x")]
)
def test_a_refused_step_fails_its_job_and_never_counts_as_success(server, engine, step, error):
    if step in LOAD_STEPS:
        engine.store(KEYS)
        answer = engine.lookup(KEYS)
        server.fail(step, error, times=100)
        assert engine.load(answer, TARGET) == target_blocks()
    else:
        server.fail(step, error, times=100)
        engine.store(KEYS)
        assert stored(engine) == 0


@pytest.mark.behaviour("D054")
def test_only_what_the_server_vouches_for_is_good(server, engine):
    engine.store(KEYS)
    answer = engine.lookup(KEYS)
    ends = bytes([Disposition.VOUCHED, Disposition.LOST, Disposition.VOUCHED])
    server.instead(m.CommitRetrieve, m.Retrieved(vouched=2), [ends])

    bad = engine.load(answer, TARGET)

    assert bad == frozenset(range(TARGET + CHUNK_BLOCKS, TARGET + 2 * CHUNK_BLOCKS))
    assert engine.worker.counters()["chunks_load_lost"] == 1


@pytest.mark.parametrize(
    ("request_type", "reply", "frames"),
    [
        (m.PrepareStore, m.Prepared(write=3), [b"short"]),
        (m.PrepareStore, m.Prepared(write=3), []),
        (m.CommitStore, m.Stored(stored=3), []),
        (m.PrepareRetrieve, m.Readable(chunks=3), [b"", b""]),
        (m.CommitRetrieve, m.Retrieved(vouched=3), [b"\x22"]),
        (m.ReadChunk, m.Bytes(), [b"not enough"]),
        (m.ReadChunk, m.Bytes(), []),
    ],
    ids=lambda x: getattr(x, "__name__", "reply"),
)
@pytest.mark.parametrize("mode", [Mode.STREAMED])
def test_answers_that_make_no_sense_fail_the_job(server, engine, request_type, reply, frames):
    if request_type in STORE_STEPS:
        server.instead(request_type, reply, frames)
        engine.store(KEYS)
        assert stored(engine) == 0
    else:
        engine.store(KEYS)
        answer = engine.lookup(KEYS)
        server.instead(request_type, reply, frames, times=100)
        assert engine.load(answer, TARGET) == target_blocks()


@pytest.mark.behaviour("R016", "R019")
def test_only_what_the_server_asks_for_is_gathered(engine):
    engine.store(KEYS[:32])
    gathered = engine.blocks.gathered

    engine.store(KEYS)

    assert engine.blocks.gathered - gathered == 2
    assert engine.worker.counters()["chunks_present"] == 1


def test_a_wrong_checksum_is_never_written_and_reported(server, engine):
    good, wrong = bytes(128 << 10), bytes([7]) * (128 << 10)
    server.engine.put(KEYS[:32], good)
    server.engine.put(KEYS[32:64], wrong, wrong=True)
    answer = engine.lookup(KEYS)
    untouched(engine)

    bad = engine.load(answer, TARGET)

    assert answer.chunks == 2
    assert bad == frozenset(range(TARGET + CHUNK_BLOCKS, TARGET + 2 * CHUNK_BLOCKS))
    assert (engine.bytes_of(TARGET + CHUNK_BLOCKS, 1) == POISON).all()
    assert engine.lookup(KEYS, "again").chunks == 1, "the server put it into quarantine"


def test_checksums_are_looked_at_only_when_the_server_asks(tmp_path, mode):
    with ScriptedServer(tmp_path, engine=TinyEngine(verify=False)) as server:
        server.engine.put(KEYS[:32], bytes(128 << 10), wrong=True)
        with FakeEngine(server.address, mode) as engine:
            engine.healthy()

            assert engine.load(engine.lookup(KEYS), TARGET) == frozenset()


@pytest.mark.behaviour("R109")
def test_close_ends_all_jobs(server, engine):
    server.drop(m.PrepareStore, 10)
    server.drop(m.PrepareRetrieve, 10)
    engine.begin_store(KEYS)
    engine.begin_load(SOME, TARGET)
    server.wait_seen(m.PrepareRetrieve)

    engine.worker.close(2)
    engine.worker.close(2)
    engine.poll()

    assert engine.stored == ["s"]
    assert engine.loaded == [("l", target_blocks())]
    assert not [t for t in threading.enumerate() if t.name in ("kvpool-store", "kvpool-load")]
    engine.store(KEYS)
    assert engine.stored == ["s", "s"], "a closed adapter drops"


def test_work_goes_on_after_a_restart(server, engine):
    engine.store(KEYS)
    epoch = engine.worker_link.state.epoch
    server.restart()
    until(lambda: engine.worker_link.state.epoch > epoch and engine.worker_link.state.healthy)
    until(lambda: engine.scheduler_link.state.epoch > 1 and engine.scheduler_link.state.healthy)
    untouched(engine)

    assert engine.load(engine.lookup(KEYS), TARGET) == frozenset()
    assert (engine.bytes_of(TARGET, 3) == engine.bytes_of(0, 3)).all()
    engine.store(digests(2, "new"))
    assert stored(engine) == 5


@pytest.mark.behaviour("D077")
@pytest.mark.parametrize("mode", [Mode.CLIENT_MOVED])
def test_mappings_go_with_their_session(server, engine):
    engine.store(KEYS)
    old = engine.worker_link.segments
    assert len(old) == 1
    server.restart()
    until(lambda: engine.worker_link.state.healthy and engine.worker_link.segments is not old)

    assert len(old) == 0


@pytest.mark.behaviour("R030")
@pytest.mark.parametrize("skip", [0, 1, CHUNK_BLOCKS - 1, CHUNK_BLOCKS, 2 * CHUNK_BLOCKS + 1, 3 * CHUNK_BLOCKS])
def test_chunks_that_are_skipped_as_a_whole_are_not_read(server, engine, skip):
    engine.store(KEYS)
    answer = engine.lookup(KEYS)

    assert engine.load(answer, TARGET, skip_blocks=skip) == frozenset()

    first = skip // CHUNK_BLOCKS
    assert engine.blocks.scattered == 3 - first
    assert all(read.chunk >= first for read in server.of(m.ReadChunk))


@pytest.mark.behaviour("R034", "D111")
def test_a_loads_pins_are_given_back_after_its_last_copy(server, engine):
    engine.store(KEYS)
    answer = engine.lookup(KEYS)
    engine.blocks.gate.clear()
    engine.blocks.entered.clear()
    engine.begin_load(answer, TARGET)
    assert engine.blocks.entered.wait(5)
    assert not server.of(m.CommitRetrieve)

    engine.blocks.gate.set()

    (commit,) = server.wait_seen(m.CommitRetrieve)
    assert (commit.lookup_id, commit.first, commit.end) == (answer.lookup_id, 0, 3)


@pytest.mark.behaviour("R034", "R035", "D021", "D111")
@pytest.mark.parametrize("cause", ["scatter", m.PrepareRetrieve, m.ReadChunk], ids=str)
@pytest.mark.parametrize("mode", [Mode.STREAMED])
def test_a_failed_load_gives_its_pins_back_at_once_and_once(server, engine, cause, caplog):
    engine.store(KEYS)
    answer = engine.lookup(KEYS)
    if cause != "scatter":
        server.fail(cause, errors.Busy("x"), times=100)

    bad = engine.load(answer, TARGET if cause != "scatter" else 10_000)

    assert len(bad) == 3 * CHUNK_BLOCKS
    server.wait_seen(m.CommitRetrieve)
    server.wait_seen(m.Ping, len(server.of(m.Ping)) + 1)
    assert len(server.of(m.CommitRetrieve)) == 1


@pytest.mark.behaviour("R106")
def test_a_store_or_load_that_failed_is_logged_with_its_reason(server, engine, caplog):
    caplog.set_level(logging.DEBUG, "kvpool.client")
    engine.store(KEYS, request_id="good")
    answer = engine.lookup(KEYS)
    server.fail(m.PrepareStore, errors.PoolFull("no room"))
    server.fail(m.PrepareRetrieve, errors.UnknownLease("gone"))

    engine.store(digests(2, "refused"), request_id="refused-store")
    engine.load(answer, TARGET, request_id="refused-load")
    server.stop()
    until(lambda: not engine.worker_link.state.healthy)
    engine.store(KEYS, request_id="uncached-store")
    engine.load(answer, TARGET, request_id="uncached-load")

    lines = [r.getMessage() for r in caplog.records]
    for name, reason in (
        ("refused-store", "pool_full no room"),
        ("refused-load", "unknown_lease gone"),
        ("uncached-store", "uncached"),
        ("uncached-load", "uncached"),
    ):
        assert [line for line in lines if name in line and reason in line], (name, lines)
    assert not [line for line in lines if "good" in line]
