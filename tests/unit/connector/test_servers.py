# SPDX-License-Identifier: Apache-2.0
"""An engine whose ranks use several servers: where the shards are, and the two halves over two scripted servers."""

import logging

import msgspec
import pytest
from tests.fakes.clients import until
from tests.fakes.engine_parts import CHUNK, FakeRequest
from tests.fakes.ranks_apart import CHUNKS, PROMPT, RanksApart
from tests.fakes.scripted_server import ScriptedServer

from kvpool.client.group import GroupScheduler
from kvpool.client.locate import Clues
from kvpool.config import ClientConfig
from kvpool.connector.attach import Attachment
from kvpool.connector.halves import SchedulerHalf
from kvpool.connector.plan import StepPlan, WorkerFacts, encode
from kvpool.connector.scheduler import Step
from kvpool.connector.servers import NotPlaced, clues_of, placements
from kvpool.model.reasons import UncachedReason
from kvpool.wire import messages as m


def rank(shard, server, node="here"):
    return WorkerFacts(shard=shard, server=server, node=node)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ("aaaa", [("a", (0, 1, 2, 3))]),
        ("aabb", [("a", (0, 1)), ("b", (2, 3))]),
        ("abab", [("a", (0, 2)), ("b", (1, 3))]),
        ("abbbbbbb", [("a", (0,)), ("b", (1, 2, 3, 4, 5, 6, 7))]),
        ("abc", [("a", (0,)), ("b", (1,)), ("c", (2,))]),
    ],
)
def test_every_shard_is_at_the_server_that_its_worker_told(ranks, expected) -> None:
    """Even or not: nothing is divided."""
    workers = [rank(shard, f"tcp://{host}:1", node=host) for shard, host in enumerate(ranks)]

    assert [(p.server, p.shards) for p in placements(workers, "elsewhere")] == [
        (f"tcp://{h}:1", shards) for h, shards in expected
    ]


def test_servers_of_other_nodes_are_found_by_their_nodes_where_a_name_lists_all() -> None:
    """One address leads each worker to its own node's server, so it says nothing to the scheduler of another node."""
    local = "tcp://kvpool-main-node.models.svc:7410"
    workers = [
        rank(0, local, "here"),
        rank(1, local, "there"),
        rank(2, "ipc:///run/s", "third"),
        rank(3, local, "here"),
    ]

    placed = placements(workers, "here", "tcp://all:7410")

    assert [(p.server, p.shards) for p in placed] == [
        (local, (0, 3)),
        ("tcp://all:7410#there", (1,)),
        ("tcp://all:7410#third", (2,)),
    ]
    assert [p.server for p in placements(workers, "head-without-a-server", "tcp://all:7410")] == [
        f"tcp://all:7410#{node}" for node in ("here", "there", "third")
    ]


def test_servers_of_other_nodes_are_looked_for_where_only_a_list_is_given() -> None:
    """What the worker told comes first, unless it leads each machine to its own server."""
    home = "tcp://kvpool-main-node.models.svc:7410"
    workers = [
        rank(0, home, "here"),
        rank(1, home, "there"),
        rank(2, "ipc:///run/s", "third"),
        rank(3, "tcp://192.0.2.4:7410", "fourth"),
    ]

    placed = placements(workers, "here", listed=True)

    assert [(p.server, clues_of(p, home)) for p in placed] == [
        (home, Clues("", "")),
        ("anywhere#there", Clues(home, home)),
        ("anywhere#third", Clues("", home)),
        ("anywhere#fourth", Clues("tcp://192.0.2.4:7410", home)),
    ]


def shared(server, readers, *, writer, shard=0):
    return WorkerFacts(shard=shard, server=server, node="here", readers=readers, writer=writer)


@pytest.mark.behaviour("R118", "R119")
def test_a_shard_that_many_ranks_hold_is_at_each_of_their_servers_with_one_writer_there() -> None:
    """MLA over two nodes: both servers keep the part, each from the first of its ranks."""
    ranks = [shared(f"ipc:///{s}", 2, writer=w) for s, w in (("a", True), ("a", False), ("b", True), ("b", False))]

    placed = placements(ranks, "here")

    assert [(p.server, p.shards, p.facts.readers) for p in placed] == [("ipc:///a", (0,), 2), ("ipc:///b", (0,), 2)]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([shared("ipc:///a", 2, writer=True), shared("ipc:///b", 2, writer=False)], "1 ranks at ipc:///a share"),
        ([shared("ipc:///a", 2, writer=True), shared("ipc:///a", 2, writer=True)], "2 of them store"),
        (
            [
                shared("ipc:///a", 2, writer=True),
                shared("ipc:///a", 2, writer=False),
                shared("ipc:///a", 1, writer=True, shard=1),
            ],
            r"shared by \[1, 2\] ranks",
        ),
    ],
)
@pytest.mark.behaviour("D072", "D073")
def test_ranks_that_do_not_fit_each_other_are_refused_by_name(ranks, words) -> None:
    with pytest.raises(NotPlaced, match=words):
        placements(ranks, "here")


def test_stages_at_one_server_are_asked_apart() -> None:
    ranks = [WorkerFacts(server="ipc:///a", node="here", stage=stage, stages=2) for stage in range(2)]

    assert [(p.stage, p.label) for p in placements(ranks, "here")] == [
        (0, "ipc:///a stage 0"),
        (1, "ipc:///a stage 1"),
    ]


@pytest.mark.parametrize("server", ["ipc:///run/k.sock", "tcp://127.0.0.1:5", "tcp://localhost:5", "tcp://[::1]:5"])
def test_a_server_that_only_its_own_machine_reaches_is_refused_by_name(server) -> None:
    with pytest.raises(NotPlaced, match=r"shard 1 is at .* another machine"):
        placements([rank(0, "ipc:///a"), rank(1, server, node="there")], "here")


@pytest.fixture
def servers(tmp_path):
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made.append(ScriptedServer(tmp_path / name))
        made[-1].start()
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def engine(servers):
    engine = RanksApart([server.address for server in servers])
    engine.healthy()
    yield engine
    engine.close()


SOURCE, TARGET = list(range(1, 11)), list(range(21, 31))


def test_what_two_ranks_stored_at_two_servers_is_loaded_by_each_from_its_own(engine, servers) -> None:
    engine.compute("one", SOURCE)
    assert [len(server.engine.slots) for server in servers] == [CHUNKS, CHUNKS]
    assert [{shard for _, shard, _ in server.engine.slots} for server in servers] == [{0}, {1}]

    assert engine.hit("two") == CHUNKS * CHUNK
    assert engine.load("two", TARGET) == set()

    for cache in engine.caches:
        for array in cache.values():
            assert (array[TARGET[:8]] == array[SOURCE[:8]]).all()
    ids = [{r.lookup_id for r in server.of(m.PrepareRetrieve)} for server in servers]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 1, "the plan names one lookup, known at both servers"


def test_a_mixed_hit_is_the_shorter_one(engine, servers) -> None:
    engine.compute("one", SOURCE)
    last = list(servers[1].engine.slots)[-1]
    del servers[1].engine.slots[last]

    assert engine.hit("two") == CHUNK
    looked_up = servers[0].of(m.Lookup)[-1].lookup_id
    until(lambda: (looked_up, 1) in [(f.lookup_id, f.first) for f in servers[0].of(m.FreeLookup)])


@pytest.mark.behaviour("D076")
def test_one_dead_server_is_a_miss_and_the_other_rank_still_stores(engine, servers) -> None:
    servers[1].stop()
    until(lambda: engine.scheduler.attachment.down() == 1 and engine.workers[1].attachment.uncached())

    assert engine.hit("miss") == 0
    plan = engine.compute("one", SOURCE)

    assert plan.stores, "the cache is not off for all"
    assert [len(server.engine.slots) for server in servers] == [CHUNKS, 0]
    assert not any(half.off for half in (engine.scheduler, *engine.workers))
    gauges = engine.scheduler.sample()["gauges"]
    assert gauges == {
        "servers_down": 1.0,
        "uncached:scheduler:unreachable": 1.0,
        f"server:{servers[0].address}:up": 1.0,
        f"server:{servers[1].address}:unreachable": 1.0,
    }
    states = engine.scheduler.attachment.states()
    assert {address: state.healthy for address, state in states.items()} == {
        servers[0].address: True,
        servers[1].address: False,
    }

    servers[1].start()
    engine.healthy()
    engine.compute("again", SOURCE)
    assert engine.hit("two") == CHUNKS * CHUNK


def test_an_answer_that_was_given_before_a_server_died_is_not_loaded_from(engine, servers) -> None:
    engine.compute("one", SOURCE)
    request = FakeRequest("two", PROMPT)
    engine.scheduler.arrived(request, 0.0)
    until(lambda: engine.matched(request) == CHUNKS * CHUNK)

    servers[1].stop()
    until(lambda: engine.scheduler.attachment.down() == 1)

    assert until(lambda: (tokens := engine.matched(request)) is not None and (tokens,)) == (0,)


def test_a_server_that_dies_under_a_load_costs_that_ranks_blocks_and_nothing_else(engine, servers) -> None:
    engine.compute("one", SOURCE)
    assert engine.hit("two") == CHUNKS * CHUNK
    servers[1].die_at(m.PrepareRetrieve)

    bad = engine.load("two", TARGET)

    assert bad == set(TARGET[:8])
    engine.scheduler.received({"two"}, bad)
    assert engine.matched(FakeRequest("two", PROMPT)) == 0


@pytest.mark.behaviour("R112")
def test_servers_with_chunks_of_different_sizes_leave_the_engine_uncached_with_that_reason(servers) -> None:
    servers[1].welcome = {"chunk_tokens": 2 * CHUNK}
    engine = RanksApart([server.address for server in servers])
    attachment = engine.scheduler.attachment
    try:
        until(lambda: attachment.down() == 0)

        assert attachment.uncached() is UncachedReason.CHUNK_TOKENS
        assert engine.hit("one") == 0
        assert engine.scheduler.plan(Step([], lambda _: [], idle=True)) == StepPlan(idle=True)
    finally:
        engine.close()


def test_one_server_for_all_ranks_is_attached_as_before(servers) -> None:
    engine = RanksApart([servers[0].address] * 2)
    try:
        engine.healthy()
        assert type(engine.scheduler.attachment) is Attachment
        assert not isinstance(engine.scheduler._side._hits._lookups, GroupScheduler)
        assert {r.shards for r in servers[0].of(m.Register)} == {(0,), (1,), (0, 1)}
        engine.compute("one", SOURCE)
        assert engine.hit("two") == CHUNKS * CHUNK
    finally:
        engine.close()


def test_one_server_under_two_addresses_is_said(servers, caplog) -> None:
    engine = RanksApart([server.address for server in servers])
    try:
        servers[1].boot_id = servers[0].boot_id
        with caplog.at_level(logging.WARNING, "kvpool.connector"):
            servers[1].stop()
            until(lambda: engine.scheduler.attachment.down() == 1)
            engine.hit("one")
            servers[1].start()
            engine.healthy()
            engine.hit("two")
            engine.hit("three")
        assert caplog.text.count("the same server") == 1
    finally:
        engine.close()


def test_a_rank_that_cannot_be_reached_is_refused_in_words(servers) -> None:
    engine = RanksApart([server.address for server in servers])
    engine.close()
    half = SchedulerHalf(ClientConfig(server=servers[0].address), "here")

    half.attach(
        [encode(w.facts if i else msgspec.structs.replace(w.facts, node="x")) for i, w in enumerate(engine.workers)]
    )

    assert "cannot be reached" in half.refusal
    assert half.attachment is None
