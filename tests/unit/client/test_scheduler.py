# SPDX-License-Identifier: Apache-2.0
from time import monotonic

import pytest
from tests.fakes.clients import FakeEngine, digests, until
from tests.fakes.scripted_server import LIMITS, ScriptedServer

import kvpool.client.scheduler as module
from kvpool.client.jobs import Answer
from kvpool.model.identity import Mode, Role
from kvpool.wire import messages as m

KEYS = digests(4)


@pytest.fixture
def mode():
    return Mode.STREAMED


@pytest.mark.behaviour("R092", "R093", "D052")
def test_a_lookup_is_pending_until_it_is_answered_and_then_stays_the_same(server, engine):
    engine.store(KEYS[:64])
    server.hold(m.Lookup)
    scheduler = engine.scheduler

    scheduler.lookup("r", KEYS)
    assert scheduler.answer("r") is None
    server.wait_seen(m.Lookup)
    assert scheduler.answer("r") is None
    server.release()

    answer = until(lambda: scheduler.answer("r"))
    assert answer.chunks == 2
    assert answer.lookup_id == server.of(m.Lookup)[0].lookup_id
    assert scheduler.answer("r") == answer


@pytest.mark.behaviour("R089")
def test_asking_again_sends_nothing_again(server, engine):
    for _ in range(5):
        engine.scheduler.lookup("r", KEYS)
    until(lambda: engine.scheduler.answer("r"))
    engine.scheduler.lookup("r", KEYS)

    assert len(server.of(m.Lookup)) == 1


def test_other_digests_of_the_same_request_are_another_lookup(server, engine):
    engine.store(KEYS)
    engine.lookup(KEYS[:64], "r")

    assert engine.lookup(KEYS, "r").chunks == 4
    assert len({r.lookup_id for r in server.of(m.Lookup)}) == 2


@pytest.mark.behaviour("R091", "D052")
def test_a_late_answer_is_a_miss_and_its_pins_are_given_back(server, engine):
    engine.store(KEYS)
    server.hold(m.Lookup)
    began_s = monotonic()

    answer = engine.lookup(KEYS, "r")

    assert answer == Answer(0)
    assert 0.3 < monotonic() - began_s < 1.5
    freed = server.wait_seen(m.FreeLookup)[0]
    assert (freed.lookup_id, freed.first) == (server.of(m.Lookup)[0].lookup_id, 0)
    assert engine.scheduler.counters()["lookups_timed_out"] == 1


@pytest.mark.behaviour("R089", "R092")
def test_without_a_server_every_lookup_is_a_miss(tmp_path):
    with FakeEngine(f"ipc://{tmp_path}/none") as engine:
        engine.scheduler.lookup("r", KEYS)

        assert engine.scheduler.answer("r") == Answer(0)
        engine.scheduler.free("r", 0, 4)
        engine.scheduler.release("r")
        engine.scheduler.end("r")
        assert engine.scheduler.answer("never asked") == Answer(0)


def test_chunks_that_are_coming_are_waited_for(server, engine):
    engine.store(KEYS)
    server.instead(m.Lookup, m.Found(chunks=1, coming=3))
    server.instead(m.LookupStatus, m.Found(chunks=2, coming=2))
    server.instead(m.LookupStatus, m.Found(chunks=4, coming=0))

    answer = engine.lookup(KEYS, "r")

    assert answer.chunks == 4
    assert len(server.of(m.LookupStatus)) == 2


def test_chunks_beyond_a_limit_are_unpinned_and_not_waited_for(server, engine):
    server.hold(m.Lookup)
    engine.scheduler.lookup("r", KEYS)
    server.wait_seen(m.Lookup)

    assert engine.scheduler.limit("r", 2) == 0, "nothing is known to be pinned yet"
    server.wait_seen(m.FreeLookup)
    server.instead(m.Lookup, m.Found(chunks=3, coming=1))
    engine.scheduler.lookup("other", KEYS)
    engine.scheduler.limit("other", 2)
    answer = until(lambda: engine.scheduler.answer("other"))

    assert answer.chunks == 2
    assert engine.scheduler.limit("other", 1) == 1
    assert engine.scheduler.answer("other") == Answer(1, answer.lookup_id)
    assert engine.scheduler.limit("other", 0) == 1
    assert engine.scheduler.answer("other") == Answer(0)
    assert engine.scheduler.limit("never asked", 1) == 0
    server.wait_seen(m.FreeLookup, 4)
    assert [f.first for f in server.of(m.FreeLookup)] == [2, 2, 1, 0]
    assert not server.of(m.LookupStatus)


@pytest.mark.behaviour("R094")
def test_coming_chunks_are_waited_for_only_so_long(server, mode):
    """As long as for any lookup, however long another answer might be waited for."""
    server.instead(m.Lookup, m.Found(chunks=1, coming=3))
    server.hold(m.LookupStatus)
    with FakeEngine(server.address, mode, request_s=60.0, lookup_s=0.5) as engine:
        answer = engine.healthy().lookup(KEYS, "r")

    assert answer.chunks == 1
    assert server.wait_seen(m.FreeLookup)[0].first == 1, "what comes later is not to be pinned"


@pytest.mark.behaviour("R096")
def test_free_release_and_end_tell_the_server(server, engine):
    engine.store(KEYS)
    lookup_id = engine.lookup(KEYS, "r").lookup_id

    engine.scheduler.free("r", 1, 3)
    engine.scheduler.free("r", 3, 3)
    engine.scheduler.free("unknown", 0, 3)
    engine.scheduler.release("r")
    engine.scheduler.end("r")

    server.wait_seen(m.EndRequest)
    freed = [(f.lookup_id, f.first, f.end) for f in server.of(m.FreeLookup)]
    assert freed == [(lookup_id, 1, 3), (lookup_id, 0, 1 << 31)]
    assert [e.request_id for e in server.of(m.EndRequest)] == ["r"]


@pytest.mark.behaviour("R095", "D064")
def test_after_its_end_nothing_is_remembered_of_a_request(engine):
    engine.store(KEYS)
    engine.lookup(KEYS, "r")
    engine.scheduler.forget_failed("r")

    engine.scheduler.end("r")

    assert engine.scheduler.answer("r") == Answer(0)
    assert engine.lookup(KEYS, "r").chunks == 4


def test_after_a_failed_load_the_same_request_sees_a_miss(server, engine):
    engine.store(KEYS)
    engine.lookup(KEYS, "r")

    engine.scheduler.forget_failed("r")
    engine.scheduler.lookup("r", KEYS)

    assert engine.scheduler.answer("r") == Answer(0)
    assert engine.lookup(KEYS, "other").chunks == 4
    assert [r.request_id for r in server.of(m.Lookup)] == ["r", "other"]


def test_a_released_lookup_can_be_asked_again(server, engine):
    engine.store(KEYS)
    engine.lookup(KEYS, "r")

    engine.scheduler.release("r")

    assert engine.lookup(KEYS, "r").chunks == 4
    assert len(server.of(m.Lookup)) == 2


@pytest.mark.behaviour("R096", "D023", "D061")
def test_what_could_not_be_sent_in_a_lost_session_need_not_be_sent_later(server, engine):
    """The leases died with the session: the server knows none of them after the restart, nor after a reconnect."""
    engine.store(KEYS)
    answer = engine.lookup(KEYS, "r")
    epoch = engine.scheduler_link.state.epoch
    server.stop()
    until(lambda: not engine.scheduler_link.state.healthy)

    assert engine.scheduler.answer("r") == Answer(0), "its pins are gone"
    engine.scheduler.free("r", 0, 4)
    engine.scheduler.end("r")
    server.start()
    until(lambda: engine.scheduler_link.state.healthy and engine.scheduler_link.state.epoch > epoch)
    server.wait_seen(m.Ping, len(server.of(m.Ping)) + 2)

    assert not server.of(m.FreeLookup)
    assert not server.of(m.EndRequest)
    assert answer.lookup_id not in server.engine.lookups


def test_an_answer_of_a_former_session_is_a_miss_in_the_next(server, engine):
    engine.store(KEYS)
    assert engine.lookup(KEYS, "r").chunks == 4
    server.restart()
    until(lambda: engine.scheduler_link.state.healthy and engine.scheduler_link.state.epoch > 1)

    assert engine.scheduler.answer("r") == Answer(0)


def test_a_server_that_dies_under_a_lookup_makes_it_a_miss(server, engine):
    server.die_at(m.Lookup)
    began_s = monotonic()

    assert engine.lookup(KEYS, "r") == Answer(0)
    assert monotonic() - began_s < 2


def test_a_producer_looks_nothing_up(server):
    with FakeEngine(server.address, role=Role.PRODUCER) as engine:
        engine.healthy()

        assert engine.lookup(KEYS) == Answer(0)
        assert not server.of(m.Lookup)


def test_no_more_digests_are_sent_than_the_server_takes(tmp_path):
    limits = m.Limits(frame_bytes=LIMITS.frame_bytes, chunks=3, in_flight=64, bulk_window=4)
    with ScriptedServer(tmp_path, limits=limits) as server, FakeEngine(server.address) as engine:
        engine.healthy()
        engine.store(KEYS[:96])

        assert engine.lookup(KEYS).chunks == 3


@pytest.mark.behaviour("D064")
def test_requests_that_are_never_ended_do_not_pile_up(engine, monkeypatch):
    monkeypatch.setattr(module, "_REQUESTS", 10)

    for i in range(50):
        engine.scheduler.lookup(f"r{i}", KEYS)
        engine.scheduler.forget_failed(f"f{i}")

    assert len(engine.scheduler._lookups) == 10
    assert len(engine.scheduler._failed) == 10
