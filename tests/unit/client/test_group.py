# SPDX-License-Identifier: Apache-2.0
"""One engine over several servers, in virtual time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.clients import digests
from tests.fakes.scripted_link import TICK_S, ScriptedLink

import kvpool.client.group as module
import kvpool.client.scheduler as adapter
from kvpool.client.group import GroupScheduler, Member, lookup_id_of, scheduler_over
from kvpool.client.jobs import Answer
from kvpool.client.scheduler import SchedulerAdapter
from kvpool.config import ClientConfig
from kvpool.wire import messages as m

KEYS = digests(12)
CONFIG = ClientConfig(lookup_s=20 * TICK_S)
DEADLINE = 20
NEVER = 1000


class Bench:
    """A group over scripted links; server n has shard n."""

    def __init__(self, *links):
        self.links = links
        self.shards = tuple(range(len(links)))
        self.group = GroupScheduler([Member(f"s{i}", link, (i,)) for i, link in enumerate(links)], CONFIG)

    def tick(self, times=1):
        for _ in range(times):
            for link in self.links:
                link.tick()

    def lookup(self, request_id="r", keys=KEYS):
        self.group.lookup(request_id, keys, self.shards)

    def answered(self, request_id="r"):
        """Tick until there is an answer; returns it and the ticks it took."""
        for ticks in range(2 * DEADLINE):
            if (answer := self.group.answer(request_id)) is not None:
                return answer, ticks
            self.tick()
        raise AssertionError("no answer")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The adapters' clock is that of the links made last."""
    links = []
    original = ScriptedLink.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        links[:] = [self]

    monkeypatch.setattr(ScriptedLink, "__init__", init)
    monkeypatch.setattr(adapter, "monotonic", lambda: links[0].now * TICK_S)


def test_one_server_needs_no_group() -> None:
    assert type(scheduler_over([Member("a", ScriptedLink(), (0, 1))], CONFIG)) is SchedulerAdapter


def test_two_servers_have_two_names() -> None:
    with pytest.raises(ValueError, match="names"):
        scheduler_over([Member("a", ScriptedLink(), (0,)), Member("a", ScriptedLink(), (1,))], CONFIG)


def test_a_shard_at_two_servers_counts_where_both_hold_it() -> None:
    links = [ScriptedLink(3), ScriptedLink(1)]
    group = GroupScheduler([Member("a", links[0], (0,)), Member("b", links[1], (0,))], CONFIG)

    group.lookup("r", digests(4), (0,))
    for link in links:
        link.tick()

    assert group.answer("r").chunks == 1
    assert [link.of(m.Lookup)[0].shards for link in links] == [(0,), (0,)]


def test_each_stage_is_asked_under_an_id_of_its_own() -> None:
    links = [ScriptedLink(3), ScriptedLink(2)]
    group = GroupScheduler([Member(f"a stage {n}", link, (0,), n) for n, link in enumerate(links)], CONFIG)

    group.lookup("r", digests(4), (0,))
    for link in links:
        link.tick()
    answer = group.answer("r")

    ids = [link.of(m.Lookup)[0].lookup_id for link in links]
    assert answer.chunks == 2
    assert len(set(ids)) == 2
    assert ids == [lookup_id_of(answer.lookup_id, stage) for stage in range(2)]


def test_a_models_chunks_are_dropped_at_all_servers_also_what_is_held() -> None:
    links = [ScriptedLink(3), ScriptedLink(3)]
    group = GroupScheduler([Member("a", links[0], (0,)), Member("b", links[1], (1,))], CONFIG)

    calls = group.clear("m")

    assert [link.of(m.Clear) for link in links] == [[m.Clear(model="m", forced=True)]] * 2
    assert len(calls) == 2


@pytest.mark.behaviour("R111", "R113")
def test_all_servers_are_asked_at_once_each_for_its_shards_under_one_id() -> None:
    links = [ScriptedLink(3, delay=5) for _ in range(3)]
    group = GroupScheduler(
        [Member("a", links[0], (0, 3)), Member("b", links[1], (1,)), Member("c", links[2], (2, 4))], CONFIG
    )

    group.lookup("r", KEYS, (0, 1, 2, 3))

    asked = [link.of(m.Lookup)[0] for link in links]
    assert [a.shards for a in asked] == [(0, 3), (1,), (2,)]
    assert len({a.lookup_id for a in asked}) == 1
    assert group.answer("r") is None, "nobody was waited for"


@pytest.mark.behaviour("R114", "R115")
def test_the_smallest_answer_counts_and_the_surplus_is_freed_before_the_last_one_is_in() -> None:
    bench = Bench(ScriptedLink(7), ScriptedLink(3, delay=2), ScriptedLink(5, delay=9))
    bench.lookup()
    bench.tick(3)
    assert bench.group.answer("r") is None
    bench.tick(1)

    assert bench.links[0].pinned() == {0, 1, 2}, "freed while the third is still asked"
    answer, _ = bench.answered()
    assert answer == Answer(3, bench.links[0].of(m.Lookup)[0].lookup_id)
    bench.tick(12)
    assert [link.pinned() for link in bench.links] == [{0, 1, 2}] * 3
    assert bench.group.answer("r") == answer
    assert bench.group.counters()["surplus_chunks"] == 4


def test_a_zero_decides_at_once_and_late_answers_pin_nothing() -> None:
    bench = Bench(ScriptedLink(0), ScriptedLink(5, delay=9))
    bench.lookup()

    assert bench.answered() == (Answer(0), 1)
    bench.tick(30)
    assert bench.links[1].of(m.Lookup)
    assert bench.links[1].pinned() == set()


@pytest.mark.behaviour("D070")
def test_a_server_that_fails_a_lookup_leaves_nothing_pinned_on_the_others() -> None:
    bench = Bench(ScriptedLink(5), ScriptedLink(5, delay=9), ScriptedLink(5))
    bench.lookup()
    bench.tick(2)
    bench.links[1].die()

    assert bench.group.answer("r") == Answer(0)
    bench.tick()
    assert bench.links[0].pinned() == bench.links[2].pinned() == set()


def test_each_server_has_its_own_deadline_and_a_slow_one_is_a_miss() -> None:
    bench = Bench(ScriptedLink(5), ScriptedLink(5, delay=NEVER))
    bench.lookup()

    answer, ticks = bench.answered()

    assert answer == Answer(0)
    assert ticks == DEADLINE
    bench.tick()
    assert bench.links[0].pinned() == set()
    assert bench.group.counters()["lookups_timed_out"] == 1


@pytest.mark.behaviour("D082")
def test_what_comes_beyond_the_smallest_answer_is_neither_waited_for_nor_kept() -> None:
    bench = Bench(ScriptedLink(2, coming=8, comes_at=15), ScriptedLink(2, delay=1))
    bench.lookup()

    answer, ticks = bench.answered()

    assert answer.chunks == 2
    assert ticks < 5
    bench.tick(20)
    assert bench.links[0].pinned() == {0, 1}, "the rest was called off before it came"


@pytest.mark.behaviour("R117")
def test_frees_and_ends_go_to_every_server() -> None:
    bench = Bench(ScriptedLink(5), ScriptedLink(5))
    bench.lookup()
    bench.answered()
    bench.group.free("r", 0, 2)
    bench.tick()
    assert [link.pinned() for link in bench.links] == [{2, 3, 4}] * 2

    bench.group.release("r")
    bench.tick()
    assert [link.pinned() for link in bench.links] == [set()] * 2
    bench.group.end("r")
    assert [[e.request_id for e in link.of(m.EndRequest)] for link in bench.links] == [["r"]] * 2
    assert bench.group.answer("r") == Answer(0)


@pytest.mark.behaviour("R116")
def test_the_state_of_each_server_is_known_and_none_is_asked_while_one_is_away() -> None:
    bench = Bench(ScriptedLink(5), ScriptedLink(5))
    bench.links[1].die()
    assert {label: state.healthy for label, state in bench.group.states().items()} == {"s0": True, "s1": False}

    bench.lookup()

    assert bench.group.answer("r") == Answer(0)
    assert not bench.links[0].sent
    assert bench.group.counters()["group_lookups_not_asked"] == 1
    bench.links[1].restart()
    bench.lookup("next")
    assert bench.answered("next")[0].chunks == 5


def test_an_answer_is_void_once_a_server_of_it_has_restarted() -> None:
    bench = Bench(ScriptedLink(5), ScriptedLink(5))
    bench.lookup()
    assert bench.answered()[0].chunks == 5

    bench.links[0].restart()

    assert bench.group.answer("r") == Answer(0)
    bench.tick()
    assert bench.links[1].pinned() == set()


def test_after_a_failed_load_the_request_sees_misses_until_its_end() -> None:
    bench = Bench(ScriptedLink(5), ScriptedLink(5))
    bench.lookup()
    bench.answered()

    bench.group.forget_failed("r")
    bench.tick()
    assert [link.pinned() for link in bench.links] == [set()] * 2
    bench.lookup()

    assert bench.group.answer("r") == Answer(0)
    bench.tick()
    assert [link.pinned() for link in bench.links] == [set()] * 2
    bench.group.end("r")
    bench.lookup()
    assert bench.answered()[0].chunks == 5


def test_a_shard_that_no_server_has_is_a_miss() -> None:
    bench = Bench(ScriptedLink(5), ScriptedLink(5))
    bench.group.lookup("r", KEYS, (0, 1, 2))

    assert bench.group.answer("r") == Answer(0)


def test_requests_that_are_never_ended_do_not_pile_up(monkeypatch) -> None:
    monkeypatch.setattr(module, "_REQUESTS", 10)
    bench = Bench(ScriptedLink(1), ScriptedLink(1))

    for i in range(30):
        bench.lookup(f"r{i}")
        bench.tick()

    assert len(bench.group._asked) == 10
    bench.tick()
    assert [len([p for p in link.pins.values() if p]) for link in bench.links] == [10, 10]


@st.composite
def servers(draw):
    """One server, and what happens to it at which tick."""
    script = {
        "held": draw(st.integers(0, 14)),
        "delay": draw(st.sampled_from([0, 0, 1, 3, 6, 30, NEVER])),
        "coming": draw(st.sampled_from([0, 0, 1, 4])),
        "comes_at": draw(st.sampled_from([0, 2, 5, NEVER])),
    }
    return script, draw(st.sampled_from([None, None, None, "die", "restart"])), draw(st.integers(0, 25))


@settings(max_examples=200)
@given(st.lists(servers(), min_size=1, max_size=8))
def test_the_result_is_the_minimum_and_no_pin_is_left(scripts) -> None:
    bench = Bench(*(ScriptedLink(**script) for script, _, _ in scripts))
    bench.lookup()
    smallest = 12
    for tick in range(60):
        for link, (_, what, when) in zip(bench.links, scripts, strict=True):
            if what and tick == when:
                getattr(link, what)()
        answer = bench.group.answer("r")
        if answer is not None:
            assert answer.chunks <= smallest, "an answer only ever shrinks, when a server is lost"
            smallest = answer.chunks
        bench.tick()

    expected = []
    for script, what, _ in scripts:
        came = script["coming"] if script["comes_at"] <= DEADLINE else 0
        late = script["delay"] > DEADLINE
        expected.append(0 if what or late else min(12, script["held"] + came))
    assert answer.chunks == min(expected)
    for link in bench.links:
        if link.delay < NEVER:
            assert link.pinned() == set(range(answer.chunks))
    bench.group.end("r")
    bench.tick(60)
    assert not any(link.pinned() for link in bench.links)
