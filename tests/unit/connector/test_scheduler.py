# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half, call by call as the engine makes them."""

from types import SimpleNamespace

import blake3
import pytest
from tests.fakes.engine_parts import BLOCK, CHUNK, GROUPS, FakeLookups, FakeRequest, chunk_keys

from kvpool.client.call import Call
from kvpool.connector.attach import Session
from kvpool.connector.hits import EARLY_LOOKUPS, Hits
from kvpool.connector.plan import GroupFacts, block_array
from kvpool.connector.rates import Rates
from kvpool.connector.scheduler import SchedulerSide, Step
from kvpool.model import keys
from kvpool.model.identity import GroupKind, Role
from kvpool.wire.messages import Clear, Cleared

SESSION = Session(epoch=1, chunk_tokens=CHUNK, lookup_lease_s=60.0)
NOTHING = (0, False)


class Bench:
    """A side, its lookups, and the engine's calls with fewer words."""

    def __init__(self, *, role=Role.BOTH, store_generated=False, lookups=None, groups=GROUPS, **least):
        self.lookups = lookups or FakeLookups()
        self.session = SESSION
        self.now_s = 0.0
        hits = Hits(
            self.lookups,
            loads=role.loads,
            shards=(0, 1),
            keys=lambda chunk_tokens: chunk_keys(chunk_tokens=chunk_tokens),
            whole=len(groups) == 1,
        )
        self.side = SchedulerSide(hits, role=role, groups=groups, store_generated=store_generated, **least)

    def hold(self, request, chunks):
        """Make the server hold the first chunks of a request."""
        digests = chunk_keys().extend(request, b"", chunks * CHUNK)
        self.lookups.held |= {digests[i : i + 32] for i in range(0, len(digests), 32)}

    def arrived(self, request, *, held=0):
        """A new request, of which the server holds the first chunks."""
        self.hold(request, held)
        self.side.arrived(request, self.session, self.now_s)
        return request

    def matched(self, request, local=0):
        return self.side.matched(request, local, self.session, self.now_s)

    def admit(self, request, *, local=0):
        """Match until answered, then allocate blocks 1, 2, ...; returns the external tokens."""
        external, _ = self.matched(request, local)
        self.side.allocated(request.request_id, self.blocks(request), external)
        return external

    def plan(self, *scheduled, preempted=(), idle=False):
        """*scheduled*: (request, tokens computed at the end of the step)."""
        tables = {request.request_id: self.blocks(request) for request, _ in scheduled}
        step = Step([(r.request_id, n) for r, n in scheduled], tables.__getitem__, preempted, idle)
        return self.side.plan(step, self.session)

    @staticmethod
    def blocks(request):
        return [list(range(1, request.num_tokens // BLOCK + 2))]


def prompt(tokens, request_id="r", first=0, **options):
    return FakeRequest(request_id, list(range(first, first + tokens)), **options)


# --- hits ------------------------------------------------------------------------------------------------------------


def test_a_miss_computes_everything() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40))

    assert bench.matched(request) == NOTHING


@pytest.mark.behaviour("R089", "D052")
def test_a_pending_answer_is_asked_for_later_and_sent_once() -> None:
    bench = Bench()
    bench.lookups.prompt = False
    request = bench.arrived(prompt(40), held=2)

    assert [bench.matched(request) for _ in range(3)] == [(None, False)] * 3
    assert bench.plan(idle=True).asking
    bench.lookups.settle()

    assert bench.matched(request) == (32, True)
    assert bench.lookups.calls == [("lookup", "r")]


@pytest.mark.behaviour("R093")
def test_asked_again_and_again_the_answer_stays() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40), held=2)

    assert [bench.matched(request) for _ in range(100)] == [(32, True)] * 100
    assert bench.lookups.calls == [("lookup", "r")]


@pytest.mark.parametrize(("least", "local", "expected"), [(32, 0, (32, True)), (33, 0, NOTHING), (17, 16, NOTHING)])
def test_a_hit_that_brings_too_few_tokens_is_computed(least, local, expected) -> None:
    bench = Bench(load_min_tokens=least)
    request = bench.arrived(prompt(40), held=2)

    assert bench.matched(request, local) == expected
    bench.side.allocated("r", bench.blocks(request), expected[0])
    assert bool(bench.plan((request, 40)).loads) is expected[1]
    assert (("release", "r") in bench.lookups.calls) is not expected[1], "what is not loaded is not held"


@pytest.mark.parametrize(("least", "stored"), [(40, True), (41, False)])
def test_a_prompt_that_is_too_short_is_not_stored_whatever_it_generates(least, stored) -> None:
    bench = Bench(store_min_tokens=least, store_generated=True)
    request = bench.arrived(prompt(40))
    bench.admit(request)
    request.output = list(range(100))

    plan = bench.plan((request, request.num_tokens))

    assert bool(plan.stores) is stored


def test_a_prompt_that_is_a_hit_to_its_last_token_is_loaded_whole() -> None:
    bench = Bench()
    request = bench.arrived(prompt(32), held=2)

    assert bench.matched(request) == (32, True)


def test_only_tokens_beyond_the_local_hit_count() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40), held=2)

    assert bench.matched(request, 20) == (12, True)
    assert bench.matched(request, 32) == NOTHING
    assert bench.matched(request, 36) == NOTHING


@pytest.mark.behaviour("R031")
def test_a_local_hit_that_ends_inside_a_block_gets_no_load() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40), held=2)

    assert bench.matched(request, BLOCK + 1) == NOTHING
    bench.side.allocated("r", bench.blocks(request), 0)

    assert bench.plan().loads == ()
    assert bench.lookups.open == {}, "nothing stays pinned for it"


@pytest.mark.behaviour("R041", "R044", "R090")
def test_all_full_chunks_are_looked_up_in_all_shards() -> None:
    asked = []

    class Lookups(FakeLookups):
        def lookup(self, request_id, digests, shards):
            asked.append((request_id, digests, shards))
            super().lookup(request_id, digests, shards)

    request = prompt(3 * CHUNK + 5)
    Bench(lookups=Lookups()).arrived(request)

    assert asked == [("r", chunk_keys().extend(request, b"", 3 * CHUNK), (0, 1))]


@pytest.mark.behaviour("D026")
def test_each_digest_is_computed_once(monkeypatch) -> None:
    made = []

    def counted(data, **how):
        made.append(data)
        return blake3.blake3(data, **how)

    monkeypatch.setattr(keys, "blake3", SimpleNamespace(blake3=counted))
    bench = Bench()
    bench.side._hits._make_keys = lambda chunk_tokens: chunk_keys(hash_tokens=0, chunk_tokens=chunk_tokens)
    request = prompt(4 * CHUNK)
    bench.side.arrived(request, SESSION, 0.0)
    for local in (0, 0, CHUNK):
        bench.matched(request, local)
    bench.admit(request)
    for computed in range(CHUNK, 5 * CHUNK, CHUNK):
        bench.plan((request, computed))
    bench.side.finished("r")

    assert len(made) == 1 + 4, "the root, and each chunk"


def test_a_short_prompt_asks_nobody() -> None:
    bench = Bench()
    request = bench.arrived(prompt(CHUNK - 1))

    assert bench.matched(request) == NOTHING
    assert bench.lookups.calls == []


@pytest.mark.parametrize("changes", [{"resumable": True}, {"skip_reading_prefix_cache": True}])
def test_requests_that_must_not_be_looked_up(changes) -> None:
    bench = Bench()
    request = bench.arrived(prompt(40, **changes), held=2)

    assert bench.matched(request) == NOTHING
    assert bench.lookups.calls == []


def test_without_a_server_nothing_is_asked_and_with_one_again() -> None:
    bench = Bench()
    bench.session = None
    request = bench.arrived(prompt(40), held=2)

    assert bench.matched(request) == NOTHING
    bench.session = SESSION
    assert bench.matched(request) == (32, True)


def test_a_lookup_of_a_lost_session_is_made_again() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40), held=2)
    bench.matched(request)

    bench.session = Session(2, CHUNK, 60.0)
    bench.lookups.held.clear()

    assert bench.matched(request) == NOTHING
    assert [c for c in bench.lookups.calls if c[0] == "lookup"] == [("lookup", "r")] * 2


@pytest.mark.behaviour("D116")
def test_a_request_that_waits_for_long_is_looked_up_again_before_its_lease_ends() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40), held=2)
    bench.matched(request)

    bench.now_s = 29.0
    bench.matched(request)
    assert bench.lookups.calls == [("lookup", "r")]
    bench.now_s = 31.0
    assert bench.matched(request) == (32, True)
    assert bench.lookups.calls == [("lookup", "r"), ("release", "r"), ("lookup", "r")]


def test_another_size_of_chunks_makes_other_digests() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40))
    bench.matched(request)

    bench.session = Session(2, 2 * CHUNK, 60.0)
    digests = chunk_keys(chunk_tokens=2 * CHUNK).extend(request, b"", 32)
    bench.lookups.held = {digests}

    assert bench.matched(request) == (32, True)


def test_a_long_queue_is_not_looked_up_on_arrival() -> None:
    bench = Bench()
    for number in range(2 * EARLY_LOOKUPS):
        bench.arrived(prompt(40, f"r{number}", first=1000 * number))

    assert len(bench.lookups.calls) == EARLY_LOOKUPS


# --- loads -----------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("D020")
def test_a_load_names_chunks_blocks_and_what_to_skip() -> None:
    bench = Bench()
    request = bench.arrived(prompt(56), held=3)

    assert bench.admit(request, local=20) == 28
    (load,) = bench.plan(idle=True).loads

    assert (load.request_id, load.lookup_id, load.first, load.end, load.skip_blocks) == ("r", b"r", 1, 3, 1)
    assert block_array(load.blocks, 2).tolist() == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert ("free", "r", 0, 1) in bench.lookups.calls


@pytest.mark.behaviour("R033")
def test_blocks_of_the_local_hit_are_never_written() -> None:
    bench = Bench()
    request = bench.arrived(prompt(56), held=3)
    bench.admit(request, local=20)
    (load,) = bench.plan().loads

    written = block_array(load.blocks, 2).ravel()[load.skip_blocks :]

    assert written.min() > 20 // BLOCK


def test_a_load_is_planned_once_though_allocation_is_told_twice() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40), held=2)
    bench.admit(request)

    assert len(bench.plan().loads) == 1
    bench.side.received(["r"], ())
    bench.side.allocated("r", bench.blocks(request), 0)
    assert bench.plan((request, 40)).loads == ()


def test_a_hit_that_the_engine_does_not_use_is_released() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40), held=2)
    bench.matched(request, 32)

    bench.side.allocated("r", bench.blocks(request), 0)

    assert ("release", "r") in bench.lookups.calls
    assert bench.plan().loads == ()


@pytest.mark.behaviour("D054")
def test_after_a_failed_load_the_same_request_sees_a_miss() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40), held=2)
    bench.admit(request)
    bench.plan()

    bench.side.received((), [2])  # one rank says so before the other has ended
    bench.side.received(["r"], ())

    assert bench.matched(request) == NOTHING
    assert ("forget_failed", "r") in bench.lookups.calls
    assert bench.side.counters()["failed_loads"] == 1
    bench.side.finished("r")
    assert bench.matched(bench.arrived(prompt(40))) == (32, True), "another request of the same tokens may hit"


def test_bad_blocks_of_another_load_are_not_ours() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40), held=2)
    bench.admit(request, local=20)

    bench.side.received(["r"], [1, 2, 999])

    assert bench.side.counters()["failed_loads"] == 0


def test_blocks_that_do_not_cover_the_load_are_our_error() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40), held=2)
    external, _ = bench.matched(request)

    with pytest.raises(ValueError, match="not all in blocks"):
        bench.side.allocated("r", [[1, 2, 3]], external)
    with pytest.raises(ValueError, match="are missing"):
        bench.side.allocated("r", [[1, 2, 3, 4, 0, 6, 7, 8]], external)


# --- stores ----------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("R010")
def test_full_chunks_are_stored_as_they_become_complete() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40))
    bench.admit(request)
    digests = chunk_keys().extend(request, b"", 40)

    assert bench.plan((request, 15)).stores == ()
    (first,) = bench.plan((request, 20)).stores
    (second,) = bench.plan((request, 40)).stores
    assert bench.plan((request, 41)).stores == ()

    assert (first.first, first.parent, first.digests) == (0, b"", digests[:32])
    assert (second.first, second.parent, second.digests) == (1, digests[:32], digests[32:])
    assert block_array(second.blocks, 1).tolist() == [[5, 6, 7, 8]]


@pytest.mark.parametrize("wanted", [False, True])
def test_generated_tokens_are_stored_only_if_wanted(wanted) -> None:
    bench = Bench(store_generated=wanted)
    request = bench.arrived(prompt(24))
    bench.admit(request)
    bench.plan((request, 24))
    request.output = list(range(8))

    stores = bench.plan((request, 32)).stores

    assert [s.first for s in stores] == ([1] if wanted else [])


def test_what_was_found_is_not_stored_again() -> None:
    bench = Bench()
    request = bench.arrived(prompt(56), held=2)
    bench.admit(request)
    bench.plan()
    bench.side.received(["r"], ())
    bench.side.allocated("r", bench.blocks(request), 0)

    (store,) = bench.plan((request, 56)).stores

    assert (store.first, len(store.digests)) == (2, 32)


def test_the_local_hit_is_stored_where_the_server_lacks_it() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40))
    bench.admit(request, local=36)

    (store,) = bench.plan((request, 40)).stores

    assert (store.first, len(store.digests)) == (0, 64)


def test_what_a_failed_load_promised_is_stored_after_it_was_computed() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40), held=2)
    bench.admit(request)
    bench.plan()
    bench.side.received(["r"], [1])

    (store,) = bench.plan((request, 40)).stores

    assert store.first == 0


def test_nothing_is_lost_while_the_server_is_away_for_a_moment() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40))
    bench.admit(request)
    bench.session = None
    assert bench.plan((request, 40)).stores == ()

    bench.session = Session(2, CHUNK, 60.0)

    assert len(bench.plan((request, 41)).stores) == 1


@pytest.mark.parametrize(("role", "hits", "stores"), [(Role.CONSUMER, 32, 0), (Role.PRODUCER, 0, 1)])
def test_roles_are_enforced(role, hits, stores) -> None:
    bench = Bench(role=role)
    request = bench.arrived(prompt(56), held=2)

    assert (bench.matched(request)[0] or 0) == hits
    assert len(bench.plan((request, 56)).stores) == stores


# --- ends ------------------------------------------------------------------------------------------------------------


def test_blocks_are_held_exactly_if_a_store_was_planned() -> None:
    bench = Bench()
    stored, short = bench.arrived(prompt(40, "stored")), bench.arrived(prompt(10, "short"))
    bench.admit(stored)
    bench.admit(short)
    bench.plan((stored, 40), (short, 10))

    assert bench.side.finished("stored")
    assert not bench.side.finished("short")
    assert not bench.side.finished("stored"), "the engine repeats itself"
    assert not bench.side.finished("unknown")
    assert bench.plan().released == ("stored",)
    assert bench.plan().released == ()


@pytest.mark.behaviour("R105")
def test_an_aborted_load_is_released_by_its_own_end_alone() -> None:
    bench = Bench()
    request = bench.arrived(prompt(56), held=2)
    bench.plan((request, 56))  # a former run stored something
    bench.plan(preempted=["r"])
    bench.admit(request)
    bench.plan()

    assert not bench.side.finished("r")
    assert bench.plan().released == ()
    bench.side.received(["r"], [1])  # late, and harmless


@pytest.mark.behaviour("D023", "D061")
def test_an_abort_ends_the_lookup_wherever_it_stands() -> None:
    for answered in (True, False):
        bench = Bench()
        bench.lookups.prompt = answered
        request = bench.arrived(prompt(40))
        bench.matched(request)

        bench.side.finished("r")

        assert bench.lookups.calls[-1] == ("end", "r")
        assert bench.lookups.open == {}


def test_a_preempted_request_starts_afresh() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40))
    bench.admit(request)
    assert len(bench.plan((request, 40)).stores) == 1
    bench.hold(request, 1)

    assert bench.plan(preempted=["r"]).preempted == ("r",)

    assert bench.admit(request) == CHUNK
    assert len(bench.plan().loads) == 1
    bench.side.received(["r"], ())
    (store,) = bench.plan((request, 40)).stores
    assert store.first == 1
    assert bench.side.finished("r")


def test_request_ids_may_come_again() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40))
    bench.admit(request)
    bench.plan((request, 40))
    bench.side.finished("r")
    bench.plan()

    again = bench.arrived(prompt(40, first=500))
    bench.admit(again)
    (store,) = bench.plan((again, 40)).stores

    assert store.digests == chunk_keys().extend(again, b"", 40)


def test_giving_up_lets_go_of_everything() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40))
    bench.admit(request)
    bench.plan((request, 40))
    bench.side.finished("r")

    plan = bench.side.give_up()

    assert (plan.released, plan.off) == (("r",), True)
    assert bench.side.give_up().released == ()


# --- several groups --------------------------------------------------------------------------------------------------

HYBRID = (
    *GROUPS,
    GroupFacts(planes=(), block_tokens=BLOCK, kind=GroupKind.WINDOW, window_tokens=8, number=1),
    GroupFacts(planes=(), block_tokens=8, kind=GroupKind.STATE, number=2),
)
TABLES = [[*range(1, 11)], [0] * 6 + [17, 18, 19, 20], [0, 0, 0, 24, 25]]


def parts(work):
    return [(p.group, p.first, block_array(p.blocks, 1).ravel().tolist()) for p in work]


def test_a_load_restores_each_group_as_far_as_the_prefix_needs_it() -> None:
    bench = Bench(groups=HYBRID)
    request = bench.arrived(prompt(40), held=2)
    assert bench.matched(request) == (32, True)

    bench.side.allocated("r", TABLES, 32)

    loads = bench.plan().loads
    assert parts(loads) == [(0, 0, [1, 2, 3, 4, 5, 6, 7, 8]), (1, 1, [0, 0, 17, 18]), (2, 1, [24])]
    assert {load.end for load in loads} == {2}
    assert [load.skip_blocks for load in loads] == [0, 2, 0]
    assert bench.side.counters()["loads"] == 1


def test_a_hit_of_several_groups_leaves_a_token_to_compute() -> None:
    """The last token of the prompt would be computed on top of a state that has it already."""
    bench = Bench(groups=HYBRID)
    request = bench.arrived(prompt(32), held=2)

    assert bench.matched(request) == (16, True)


def test_local_hits_that_one_group_has_no_whole_block_of_get_no_load() -> None:
    bench = Bench(groups=HYBRID)
    request = bench.arrived(prompt(40), held=2)

    assert bench.matched(request, 8) == (24, True)
    assert bench.matched(request, 12) == NOTHING


def test_a_step_stores_each_group_as_far_as_it_is_there() -> None:
    bench = Bench(groups=HYBRID)
    request = bench.arrived(prompt(40))
    assert bench.matched(request) == NOTHING
    bench.side.allocated("r", TABLES, 0)
    states = {"r": [(2, 24, 32), (2, 25, 40), (1, 99, 16)]}

    plan = bench.side.plan(Step([("r", 40)], lambda _: TABLES, states=states), SESSION)

    assert parts(plan.stores) == [
        (0, 0, [1, 2, 3, 4, 5, 6, 7, 8]),
        (1, 1, [-1, -1, 17, 18]),
        (2, 1, [24]),
    ], "a window's first chunk is gone, and no state was saved at its end"
    digests = chunk_keys().extend(request, b"", 40)
    assert [(s.parent, s.digests) for s in plan.stores[1:]] == [(digests[:32], digests[32:64])] * 2
    assert bench.side.counters()["stores"] == 1


@pytest.mark.behaviour("D054")
def test_a_load_that_failed_as_a_whole_is_a_miss_from_then_on() -> None:
    bench = Bench(groups=HYBRID)
    request = bench.arrived(prompt(40), held=2)
    assert bench.matched(request) == (32, True)
    bench.side.allocated("r", TABLES, 32)

    bench.side.received({"r"}, (), {"r"})

    assert bench.matched(request) == NOTHING
    assert bench.side.counters()["failed_loads"] == 1


# --- what requests ask for, and what is worth it ---------------------------------------------------------------------


def wishing(**wishes):
    return prompt(40, kv_transfer_params={"kvpool": wishes})


@pytest.mark.parametrize(
    ("wishes", "loaded", "stored"),
    [
        ({}, 32, 0),
        ({"store": False}, 32, 0),
        ({"load": False}, 0, 2),
        ({"store": False, "load": False}, 0, 0),
        ({"max_load_tokens": 31}, 16, 1),
        ({"max_load_tokens": 15}, 0, 2),
        ({"stor": False}, 0, 0),
        ({"store": "no"}, 0, 0),
        ({"max_load_tokens": -1}, 0, 0),
    ],
)
def test_a_request_may_opt_out(wishes, loaded, stored) -> None:
    """What cannot be understood gets neither: a wish to opt out must not be lost to a typing error."""
    bench = Bench()
    request = bench.arrived(wishing(**wishes), held=2)

    assert bench.matched(request)[0] == loaded
    bench.side.allocated("r", bench.blocks(request), loaded)
    bench.plan()
    bench.side.received(["r"], ())

    assert sum(len(s.digests) // 32 for s in bench.plan((request, 40)).stores) == stored


def test_parameters_of_others_are_none_of_ours() -> None:
    bench = Bench()
    request = bench.arrived(prompt(40, kv_transfer_params={"do_remote_prefill": True}), held=2)

    assert bench.matched(request) == (32, True)
    assert bench.side.outcome("r") is None


def test_who_asks_for_something_is_told_what_was_loaded() -> None:
    bench = Bench()
    request = bench.arrived(wishing(), held=2)
    bench.admit(request)
    assert bench.side.outcome("r") == {"kvpool": {"loaded_tokens": 32}}

    bench.plan()
    bench.side.received(["r"], [1])
    assert bench.side.outcome("r") == {"kvpool": {"loaded_tokens": 0}}


class NeverWorth(Rates):
    def worth(self, tokens):  # noqa: ARG002 - of whatever size
        return False


def test_a_hit_that_is_not_worth_a_load_is_computed_and_not_stored_again() -> None:
    rates = NeverWorth(1.0)
    bench = Bench(rates=rates)
    request = bench.arrived(prompt(40), held=2)

    assert [bench.matched(request) for _ in range(3)] == [NOTHING] * 3
    bench.side.allocated("r", bench.blocks(request), 0)

    assert bench.plan((request, 40)).stores == ()
    assert bench.lookups.open == {}
    assert (bench.side.counters()["loads_not_worth"], rates.refused) == (1, 1)


@pytest.mark.parametrize("answered", [True, False])
def test_a_reset_drops_what_is_kept_and_what_was_computed_until_now(answered) -> None:
    """Whoever resets has changed the weights, or what they stand for."""
    bench = Bench()
    request = bench.arrived(prompt(40), held=0)
    bench.admit(request)
    call = Call(Clear(model="m", forced=True), (), 1.0)
    if answered:
        call.finish(Cleared(chunks=1, kept=0), ())
    bench.lookups.clears = [call]

    assert bench.side.reset("m", 0.01) is answered
    assert bench.lookups.calls[-1] == ("clear", "m")
    assert bench.plan((request, 40)).stores == ()
    fresh = bench.arrived(prompt(40, "s"))
    bench.admit(fresh)
    assert bench.plan((fresh, 40)).stores != ()
