# SPDX-License-Identifier: Apache-2.0
"""Stores that gather while the server looks for room: its word counts in the end, and no slot of the ring is lost."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from tests.fakes.clients import digests, until
from tests.fakes.ring_engine import RingEngine
from tests.fakes.server_process import WITH_FAKE_MOVERS, ServerProcess

from kvpool.client.call import Call
from kvpool.client.ringing import RingKeeper
from kvpool.model.checksum import PREFERRED
from kvpool.transfer.mover.messages import Direction
from kvpool.wire.messages import CommitStore

KEYS = digests(6)
TARGET = 128
SLOTS = 4


@pytest.fixture
def server(tmp_path):
    with ServerProcess(tmp_path, program=WITH_FAKE_MOVERS) as server:
        yield server


@pytest.fixture
def engine(server):
    with RingEngine(server.address, slots=SLOTS) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        yield engine


def ring_of(engine):
    return engine.rings.current()._ring


def all_slots_are_free(engine):
    return sorted(ring_of(engine)._stores._lane.free) == [*range(SLOTS)]


def comes_back(engine, keys, request_id):
    answer = engine.lookup(keys, request_id)
    assert answer.chunks == len(keys) // 32
    assert engine.load(answer, TARGET, request_id=request_id) == frozenset()
    return (engine.bytes_of(TARGET, answer.chunks) == engine.bytes_of(0, answer.chunks)).all()


def test_the_first_chunks_are_gathered_before_the_server_answers(server, engine):
    server.stop()
    engine.begin_store(KEYS)
    until(lambda: engine.device.launches == SLOTS // 2)
    server.go_on()
    until(lambda: engine.poll() and engine.stored)

    assert comes_back(engine, KEYS, "l")
    assert all_slots_are_free(engine)


@pytest.mark.parametrize("direction", list(Direction))
def test_nothing_is_prepared_before_the_question_is_out(server, engine, monkeypatch, direction):
    """Its thread would only wait for the interpreter."""
    engine.store(KEYS)
    answer = engine.lookup(KEYS, "l")
    note, held = Call.note_sent, []
    monkeypatch.setattr(Call, "note_sent", lambda call: held.append(call))  # noqa: PLW0108 - bound only so
    server.stop()
    if direction is Direction.STORE:
        engine.begin_store(digests(6, "other"))
        lane = engine.worker._stores
    else:
        engine.begin_load(answer, TARGET)
        lane = engine.worker._loads
    (work,) = lane._queue
    until(lambda: work.prepared in held)
    assert work._ring.is_new()
    assert not work.can_prepare()

    note(work.prepared)

    until(lambda: not work._ring.is_new())
    server.go_on()
    until(lambda: engine.poll() and (engine.loaded or len(engine.stored) == 2))


def test_no_block_is_gathered_before_it_is_final(server, engine):
    server.stop()
    job = engine.begin_store(KEYS, ready=False)
    other = engine.begin_store(digests(6, "other"), request_id="other")
    until(lambda: engine.device.launches == SLOTS // 2)
    assert other.ready.is_set()
    server.go_on()
    until(lambda: engine.poll() and engine.stored == ["other"])

    engine.blocks.fill(2)
    job.after = SimpleNamespace(event=7)
    job.ready.set()
    until(lambda: engine.poll() and len(engine.stored) == 2)

    assert engine.device.events == [7]
    assert comes_back(engine, KEYS, "l")


@pytest.mark.parametrize("first", [1, 5])
def test_chunks_that_the_server_has_are_gathered_in_vain(server, engine, first):
    """It wants others than all of them: what was gathered is given up, and what it wants is right."""
    engine.store(KEYS[: first * 32], request_id="before")
    launched = engine.device.launches
    server.stop()
    engine.begin_store(KEYS)
    until(lambda: engine.device.launches > launched)
    server.go_on()
    until(lambda: engine.poll() and len(engine.stored) == 2)

    assert comes_back(engine, KEYS, "l")
    assert all_slots_are_free(engine)


def test_a_store_of_which_nothing_is_wanted_leaves_its_slots(server, engine):
    engine.store(KEYS)
    launched = engine.device.launches
    server.stop()
    engine.begin_store(KEYS, request_id="again")
    until(lambda: engine.device.launches > launched)
    server.go_on()
    until(lambda: engine.poll() and len(engine.stored) == 2)

    assert all_slots_are_free(engine)


@pytest.mark.parametrize("there", [6, 0])
def test_blocks_are_read_until_what_was_gathered_in_vain_is_over(server, engine, there):
    """All is there already, or the store came too late: it ends when no kernel of it runs any more."""
    if there:
        engine.store(KEYS)
    answered = threading.Event()
    server.stop()
    engine.blocks.entered.clear()
    engine.blocks.gate.clear()
    job = engine.begin_store(KEYS, request_id="again")
    assert engine.blocks.entered.wait(30)
    (work,) = engine.worker._stores._queue
    if not there:
        work._rows = lambda: work._drop("late")
    work.prepared.then(lambda: (answered.set(), engine.worker._stores.kick()))
    server.go_on()
    assert answered.wait(30)

    assert not job.gathered.wait(0.1), "a kernel reads them"
    engine.blocks.gate.set()
    assert job.gathered.wait(30)
    until(lambda: engine.poll() and "again" in engine.stored)
    assert all_slots_are_free(engine)


def test_a_cancelled_store_that_gathers_is_waited_for(server, engine):
    """The engine may reuse the blocks as soon as it is told that none is read."""
    server.stop()
    engine.blocks.gate.clear()
    engine.begin_store(KEYS)
    assert engine.blocks.entered.wait(30)

    for _ in range(2):
        assert not engine.worker.cancel_stores(["s"], 0.05), "a kernel is running"
    engine.blocks.gate.set()
    assert engine.worker.cancel_stores(["s"], 30)
    server.go_on()
    until(lambda: engine.poll() and engine.stored)

    assert all_slots_are_free(engine)
    assert engine.lookup(KEYS).chunks == 0, "nothing of it was committed"
    engine.store(KEYS, request_id="after")
    assert comes_back(engine, KEYS, "l2")


def test_the_end_of_a_client_waits_for_what_it_gathers(server, engine):
    server.stop()
    engine.blocks.gate.clear()
    job = engine.begin_store(KEYS)
    assert engine.blocks.entered.wait(30)
    closing = threading.Thread(target=engine.worker.close, args=(30,))
    closing.start()

    assert not job.gathered.wait(0.1), "its blocks are read"
    engine.blocks.gate.set()
    closing.join(60)

    assert job.gathered.is_set()
    assert not any(engine.device._pending.values())
    server.go_on()


def test_ids_that_are_wrong_are_found_before_anything_is_gathered(server, engine):
    """The table of blocks is one that no cache has; the store ends, and the next one works."""
    server.stop()
    job = engine.begin_store(KEYS, ready=False)
    job.block_ids = np.full_like(job.block_ids, len(engine.blocks.memory))
    job.ready.set()
    engine.poll()
    server.go_on()
    until(lambda: engine.poll() and engine.stored)

    assert engine.device.launches == 0
    engine.store(KEYS, request_id="after")
    assert comes_back(engine, KEYS, "l")


def test_a_load_checks_its_blocks_before_the_server_answers(server, engine):
    engine.store(KEYS)
    answer = engine.lookup(KEYS, "l")
    ring = engine.rings.current()
    made, move = [], ring.move
    ring.move = lambda work: (made.append(work), move(work))[1]
    server.stop()
    engine.begin_load(answer, TARGET)
    until(lambda: made)
    server.go_on()
    until(lambda: engine.poll() and engine.loaded)

    assert len(made) == 1, "and not once more"
    assert engine.loaded == [("l", frozenset())]
    assert (engine.bytes_of(TARGET, 6) == engine.bytes_of(0, 6)).all()


def test_what_is_streamed_after_all_brings_its_checksums(server, monkeypatch):
    """The ring is joined, but the server does not know that yet: it gives no grant."""
    told, tell = threading.Event(), RingKeeper._ask

    def held(keeper, epoch, ring, failure):
        assert ring is None or told.wait(60)
        return tell(keeper, epoch, ring, failure)

    monkeypatch.setattr(RingKeeper, "_ask", held)
    with RingEngine(server.address, slots=SLOTS) as engine:
        assert engine.worker_link.wait_healthy(60)
        until(engine.rings.current, 60)
        engine.blocks.fill(1)
        sent, submit = [], engine.worker_link.submit
        engine.worker_link.submit = lambda request, *more, **options: (
            sent.append(request),
            submit(request, *more, **options),
        )[1]
        server.stop()
        engine.begin_store(KEYS)
        until(lambda: engine.device.launches)
        server.go_on()
        until(lambda: engine.poll() and engine.stored)

        (commit,) = [request for request in sent if isinstance(request, CommitStore)]
        assert commit.checksum_kind is PREFERRED
        assert all_slots_are_free(engine)
        told.set()
        engine.healthy()
        assert comes_back(engine, KEYS, "l")
