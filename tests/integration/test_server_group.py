# SPDX-License-Identifier: Apache-2.0
"""One engine over several real servers, one of which is killed, stopped, restarted or of another version."""

from time import monotonic

import pytest
from tests.fakes.clients import CHUNK_BLOCKS, digests, until
from tests.fakes.rank_group import RankGroup
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.server_process import ServerProcess

from kvpool.client.jobs import Answer
from kvpool.model.errors import VersionMismatch
from kvpool.model.reasons import UncachedReason
from kvpool.wire import messages as m

KEYS = digests(4)
TARGET = 100
BLOCKS = 4 * CHUNK_BLOCKS


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    made = [ServerProcess(tmp_path_factory.mktemp(f"server{n}")) for n in range(3)]
    yield made
    for process in made:
        process.kill()


@pytest.fixture
def servers(processes):
    """Three servers, running whatever the last test did to them."""
    for process in processes:
        process.start()
    return processes


@pytest.fixture
def group(servers, request):
    """A healthy engine with a rank at each server, and four chunks stored by all."""
    with RankGroup([server.address for server in servers], request.node.name) as group:
        group.healthy()
        for rank in group.ranks:
            rank.store(KEYS)
        yield group


def check_hit(group, request_id="hit"):
    """Look up, load on all ranks, compare every byte."""
    answer = group.lookup(KEYS, request_id)
    assert answer.chunks == 4
    for rank in group.ranks:
        assert rank.load(answer, TARGET, request_id) == frozenset()
        assert (rank.blocks.memory[TARGET : TARGET + BLOCKS] == rank.blocks.memory[:BLOCKS]).all()
    group.scheduler.end(request_id)
    group.no_leases()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_rank_loads_its_part_of_one_lookup_from_its_own_server(servers, request, count):
    with RankGroup([server.address for server in servers[:count]], request.node.name) as group:
        group.healthy()
        for rank in group.ranks:
            rank.store(KEYS)

        check_hit(group)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_hold_different_lengths_hit_the_shortest_and_no_more_is_pinned(servers, request, count):
    with RankGroup([server.address for server in servers[:count]], request.node.name) as group:
        group.healthy()
        for rank, chunks in zip(group.ranks, (4, 2, 3), strict=False):
            rank.store(KEYS[: chunks * 32])

        answer = group.lookup(KEYS)

        assert answer.chunks == 2
        group.scheduler.free("l", 0, 2)
        group.no_leases()
        group.scheduler.release("l")
        assert group.ranks[0].load(group.lookup(KEYS), TARGET) == frozenset()


def test_a_killed_server_is_a_miss_frees_the_others_and_comes_back_with_its_chunks(servers, group):
    held = group.lookup(KEYS, "before")
    assert held.chunks == 4
    servers[1].kill()
    until(lambda: [state.healthy for state in group.scheduler.states().values()] == [True, False, True])

    assert group.scheduler.answer("before") == Answer(0)
    assert group.lookup(KEYS, "while it is gone") == Answer(0)
    group.no_leases(group.ranks[0], group.ranks[2])

    servers[1].start()
    group.healthy()
    check_hit(group)


@pytest.mark.behaviour("D070")
def test_a_server_that_is_killed_while_it_is_asked_leaves_nothing_pinned_on_the_others(servers, group):
    servers[2].stop()
    group.scheduler.lookup("l", KEYS, group.shards)
    until(lambda: group.ranks[0].leases() == group.ranks[1].leases() == 1)
    assert group.scheduler.answer("l") is None
    servers[2].kill()

    assert until(lambda: group.scheduler.answer("l")) == Answer(0)
    group.no_leases(*group.ranks[:2])
    servers[2].start()
    group.healthy()
    check_hit(group)


@pytest.mark.behaviour("D074")
def test_a_stopped_server_costs_one_deadline_and_no_call_waits_for_it(servers, group):
    servers[1].stop()
    slowest_s, began_s = 0.0, monotonic()

    def answer():
        nonlocal slowest_s
        before_s = monotonic()
        group.scheduler.lookup("l", KEYS, group.shards)
        found = group.scheduler.answer("l")
        slowest_s = max(slowest_s, monotonic() - before_s)
        return found

    assert until(answer) == Answer(0)
    took_s = monotonic() - began_s
    group.no_leases(group.ranks[0], group.ranks[2])
    servers[1].go_on()

    assert 0.4 < took_s < 2.0, "its own deadline, not a sum of them"
    assert slowest_s < 0.2
    group.scheduler.end("l")
    group.healthy()
    group.no_leases()
    check_hit(group)


def test_answers_given_before_a_restart_are_void_and_the_next_lookup_hits(servers, group):
    assert group.lookup(KEYS, "old").chunks == 4
    epoch = group.ranks[0].asking.state.epoch
    servers[0].restart()
    until(lambda: group.ranks[0].asking.state.epoch > epoch and group.ranks[0].asking.state.healthy, 30)
    group.healthy()

    assert group.scheduler.answer("old") == Answer(0)
    group.no_leases()
    check_hit(group)


def test_a_server_killed_between_lookup_and_load_costs_its_rank_its_blocks_and_the_others_nothing(servers, group):
    answer = group.lookup(KEYS)
    servers[1].kill()

    bad = [rank.load(answer, TARGET) for rank in group.ranks]

    assert bad == [frozenset(), frozenset(range(TARGET, TARGET + BLOCKS)), frozenset()]
    group.scheduler.forget_failed("l")
    group.no_leases(group.ranks[0], group.ranks[2])
    assert group.lookup(KEYS) == Answer(0)


def test_a_server_of_another_version_is_a_miss_with_that_reason(servers, tmp_path, request):
    with ScriptedServer(tmp_path) as other:
        other.fail(m.Hello, VersionMismatch("too new"), times=1000)
        with RankGroup([servers[0].address, other.address], request.node.name) as group:
            until(group.ranks[0].healthy, 30)
            until(lambda: group.scheduler.states()[other.address].reason is UncachedReason.VERSION)
            group.ranks[0].store(KEYS)

            assert group.lookup(KEYS) == Answer(0)
            group.no_leases(group.ranks[0])
