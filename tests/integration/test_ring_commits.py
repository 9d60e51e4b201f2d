# SPDX-License-Identifier: Apache-2.0
"""When stores and loads that go through a ring are committed: while the mover moves, where the server knows that."""

import pytest
from tests.fakes.clients import FakeEngine, digests, until
from tests.fakes.ring_engine import RingEngine
from tests.fakes.server_process import WITH_FAKE_MOVERS, ServerProcess

from kvpool.client import worker
from kvpool.client.channel import Errand
from kvpool.model.identity import Mode
from kvpool.wire.messages import CommitRetrieve, CommitStore, Stats

TARGET = 128
PATIENCE_S = 60.0


@pytest.fixture
def engine(tmp_path):
    with (
        ServerProcess(tmp_path, program=WITH_FAKE_MOVERS) as server,
        RingEngine(server.address, model="m") as engine,
    ):
        engine.healthy(PATIENCE_S)
        until(lambda: not engine.rings.reason, PATIENCE_S)
        yield engine


@pytest.fixture
def commits(monkeypatch):
    """The commits that are sent, as (kind, moving)."""
    sent, real = [], Errand.conclude

    def conclude(self, request, frames):
        if isinstance(request, CommitStore | CommitRetrieve):
            sent.append((type(request), request.moving))
        return real(self, request, frames)

    monkeypatch.setattr(Errand, "conclude", conclude)
    return sent


def there_and_back(engine, commits, name="l", *, ahead=True):
    engine.blocks.fill(3)
    keys = digests(4, name)  # no more than all slots have: the mover is asked for all of it at once
    engine.store(keys)
    answer = engine.lookup(keys, name)
    sent = len(commits)
    engine.blocks.gate.clear()
    engine.begin_load(answer, TARGET, request_id=name)
    # Its kernels are held: without a server that takes commits before the end there is none.
    until(lambda: len(commits) > sent or not ahead, PATIENCE_S)
    engine.blocks.gate.set()
    until(lambda: engine.poll() and (name, frozenset()) in engine.loaded, PATIENCE_S)
    assert (engine.bytes_of(TARGET, 4) == engine.bytes_of(0, 4)).all()


def test_one_commit_is_enough_and_is_sent_while_the_mover_moves(engine, commits):
    there_and_back(engine, commits)

    assert commits == [(CommitStore, True), (CommitRetrieve, True)]


def test_a_server_that_does_not_know_it_is_asked_at_the_end(engine, commits, monkeypatch):
    monkeypatch.setattr(worker, "MOVING", "a feature that this server does not have")

    there_and_back(engine, commits, ahead=False)

    assert commits == [(CommitStore, False), (CommitRetrieve, False)]


def test_a_load_whose_chunks_come_two_ways_is_committed_once_and_after_both(engine, commits):
    """What a client stored in memory that it maps is not for movers: it is streamed after what the ring brings."""
    keys = digests(5)
    with FakeEngine(engine.config.server, Mode.CLIENT_MOVED, blocks=len(engine.blocks.memory), model="m") as other:
        other.healthy()
        other.blocks.fill(3)
        other.store(keys[:64])
    engine.blocks.fill(3)
    engine.store(keys)
    answer = engine.lookup(keys)
    assert answer.chunks == 5
    commits.clear()
    before = engine.blocks.scattered

    assert engine.load(answer, TARGET) == frozenset()

    assert (engine.bytes_of(TARGET, 5) == engine.bytes_of(0, 5)).all()
    assert engine.blocks.scattered - before == 5
    assert commits == [(CommitRetrieve, False)]


def test_a_store_that_is_cancelled_under_way_is_committed_as_it_ended(engine, commits):
    engine.blocks.fill(4)
    engine.blocks.gate.clear()
    engine.begin_store(digests(8), request_id="s")
    assert engine.blocks.entered.wait(PATIENCE_S)

    engine.worker.cancel_stores(["s"], 0.0)
    engine.blocks.gate.set()
    until(lambda: engine.poll() and engine.stored, PATIENCE_S)

    assert commits[-1] == (CommitStore, False)
    kept = engine.lookup(digests(8)).chunks
    assert kept == engine.worker.counters().get("chunks_stored", 0) < 8
    assert engine.scheduler_link.call(Stats())[0].counters["kvpool_illegal_moves_total"] == 0
    there_and_back(engine, commits, "again")
