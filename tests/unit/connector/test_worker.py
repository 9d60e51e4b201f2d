# SPDX-License-Identifier: Apache-2.0
"""The worker's half: each load and each release reported once, exact blocks, whatever fails."""

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace
from tests.fakes.engine_parts import BLOCK, CHUNK, GROUPS, FakeTransfers

from kvpool.connector.plan import GroupFacts, PlannedLoad, PlannedStore, StepPlan, decode, encode
from kvpool.connector.worker import WorkerSide
from kvpool.model.identity import GroupKind, Role

ids = lambda *blocks: np.array(blocks, dtype="<i8").tobytes()  # noqa: E731


def load(request_id="r", *, first=0, chunks=1, skip=0, start=1):
    blocks = ids(*range(start, start + chunks * CHUNK // BLOCK))
    return PlannedLoad(
        request_id=request_id, lookup_id=b"l" * 16, first=first, end=first + chunks, blocks=blocks, skip_blocks=skip
    )


def store(request_id="r", start=1):
    blocks = ids(*range(start, start + CHUNK // BLOCK))
    return PlannedStore(request_id=request_id, first=0, parent=b"", digests=b"d" * 32, blocks=blocks)


def plan(*work, **values):
    loads = tuple(w for w in work if isinstance(w, PlannedLoad))
    stores = tuple(w for w in work if isinstance(w, PlannedStore))
    made = StepPlan(chunk_tokens=CHUNK if work else 0, loads=loads, stores=stores, **values)
    return decode(encode(made), StepPlan)


class Bench:
    def __init__(self, **options):
        self.transfers = FakeTransfers()
        values = {"place": (0, 3), "writer": True, "role": Role.BOTH, "groups": GROUPS, "timeout_s": 1.0}
        self.side = WorkerSide(self.transfers, **(values | options))

    def step(self, step, *, ran=True):
        """One step as the engine calls it; returns sent, loaded and bad blocks."""
        self.side.preempt(step)
        self.side.begin(step)
        self.side.load(step)
        self.side.saved(ran=ran)
        sent, loaded = self.side.results(idle=step.idle, asking=step.asking)
        return sent, loaded, self.side.bad_blocks()


NOTHING = (set(), set(), set())


def test_an_empty_plan_is_an_empty_buffer() -> None:
    assert encode(StepPlan()) == b""
    assert Bench().step(decode(b"", StepPlan)) == NOTHING


@pytest.mark.behaviour("R012")
def test_a_store_is_asked_for_before_the_step_and_read_after_it() -> None:
    bench = Bench()
    bench.side.begin(plan(store()))
    (job,) = bench.transfers.stores

    assert (job.shard, job.group, job.digests, job.block_ids.tolist()) == (3, 0, b"d" * 32, [[1, 2, 3, 4]])
    assert not job.ready.is_set()
    bench.side.saved(ran=True)
    assert job.ready.is_set()


@pytest.mark.behaviour("R014", "D001")
def test_scatters_follow_the_steps_before_and_gathers_the_step_itself() -> None:
    moments = iter(("before", "after"))
    bench = Bench(moment=lambda: next(moments))
    step = plan(load("l"), store())

    bench.side.begin(step)
    (stored,) = bench.transfers.stores
    seen = []
    stored.ready = SimpleNamespace(set=lambda: seen.append(stored.after))
    bench.side.load(step)
    (loaded,) = bench.transfers.loads
    assert (loaded.after, seen) == ("before", [])

    bench.side.saved(ran=True)
    assert seen == ["after"], "known before anybody may gather"


def test_a_step_that_failed_keeps_nothing() -> None:
    bench = Bench()
    bench.side.begin(plan(store()))
    (job,) = bench.transfers.stores

    bench.side.saved(ran=False)

    assert bench.transfers.cancelled == ["r"]
    assert bench.transfers.stores == []
    assert job.ready.is_set()


@pytest.mark.parametrize("options", [{"writer": False}, {"role": Role.CONSUMER}])
@pytest.mark.behaviour("R119")
def test_who_does_not_write_stores_nothing_and_holds_nothing(options) -> None:
    bench = Bench(**options)

    bench.step(plan(store()))

    assert bench.transfers.stores == []
    assert bench.step(plan(released=("r",))) == ({"r"}, set(), set())


@pytest.mark.behaviour("R101", "R102", "R103", "D057", "D060")
def test_a_released_request_is_reported_once_and_after_its_last_store() -> None:
    bench = Bench()
    bench.step(plan(store()))
    bench.step(plan(store(start=5)))

    assert bench.step(plan(released=("r",))) == NOTHING
    bench.transfers.stores.pop()  # one of two has ended
    assert bench.step(plan()) == NOTHING
    bench.transfers.end_stores("r")
    assert bench.step(plan()) == ({"r"}, set(), set())
    assert bench.step(plan()) == NOTHING
    assert bench.step(plan(released=("other",))) == ({"other"}, set(), set()), "without stores: at once"
    assert bench.step(plan(released=("r",))) == ({"r"}, set(), set()), "an id may be used again"


def test_a_load_is_reported_once_with_its_bad_blocks() -> None:
    bench = Bench()
    assert bench.step(plan(load(skip=1))) == NOTHING
    (job,) = bench.transfers.loads
    assert (job.shard, job.first, job.end, job.skip_blocks, job.lookup_id) == (3, 0, 1, 1, b"l" * 16)
    assert bench.side.counters()["loads_in_flight"] == 1

    bench.transfers.end_load("r", bad={3, 4})

    assert bench.step(plan()) == (set(), {"r"}, {3, 4})
    assert bench.step(plan()) == NOTHING
    assert bench.side.counters() == {"failed_loads": 1, "bad_blocks": 2, "loads_in_flight": 0}


@pytest.mark.behaviour("R100")
def test_stores_and_loads_of_several_requests_in_one_step() -> None:
    bench = Bench()
    work = (load("a"), load("b", start=5), store("c", start=9), store("d", start=13))
    bench.step(plan(*work))

    assert [(job.request_id, job.block_ids[0, 0]) for job in bench.transfers.loads] == [("a", 1), ("b", 5)]
    assert [(job.request_id, job.block_ids[0, 0]) for job in bench.transfers.stores] == [("c", 9), ("d", 13)]
    bench.transfers.end_load("b", bad={6})
    assert bench.step(plan()) == (set(), {"b"}, {6})
    bench.transfers.end_load("a", bad=set())
    assert bench.step(plan()) == (set(), {"a"}, set())


@pytest.mark.behaviour("R107")
def test_bad_blocks_are_returned_and_cleared() -> None:
    bench = Bench()
    bench.step(plan(load()))
    bench.transfers.end_load("r", bad={1})
    bench.step(plan())

    assert bench.side.bad_blocks() == set()


@pytest.mark.behaviour("R133", "D078", "D057")
def test_preemption_ends_the_reading_first() -> None:
    bench = Bench()
    bench.step(plan(store("r"), store("other", start=5)))

    bench.side.preempt(plan(preempted=("r", "never stored")))

    assert bench.transfers.cancelled == ["r"]
    assert [j.request_id for j in bench.transfers.stores] == ["other"]


def test_a_gather_that_does_not_end_is_an_error() -> None:
    bench = Bench()
    bench.step(plan(store()))
    bench.transfers.cancels = False

    with pytest.raises(TimeoutError):
        bench.side.preempt(plan(preempted=("r",)))
    with pytest.raises(TimeoutError):
        bench.side.preempt(plan(off=True))


def test_when_the_scheduler_gives_up_all_stores_end() -> None:
    bench = Bench()
    bench.step(plan(store("r"), store("other", start=5)))

    bench.step(plan(off=True, released=("r",)))

    assert bench.transfers.cancelled == ["other", "r"]


@pytest.mark.behaviour("R098", "D053", "D054")
def test_a_half_that_is_off_fails_loads_at_once_and_holds_nothing() -> None:
    bench = Bench()
    bench.side.off = True

    assert bench.step(plan(load(skip=2), store("s"), released=("x",))) == ({"x"}, {"r"}, {3, 4})
    assert bench.transfers.loads == bench.transfers.stores == []


def test_a_load_planned_without_a_session_fails_at_once() -> None:
    bench = Bench()
    planned = StepPlan(loads=(load(),))

    assert bench.step(planned) == (set(), {"r"}, {1, 2, 3, 4})


def test_abandoning_reports_everything_once_after_the_copies_ended() -> None:
    bench = Bench()
    bench.step(plan(load(skip=1), store("s")))
    bench.step(plan(released=("s",)))

    sent, loaded = bench.side.abandon()

    assert (sent, loaded, bench.side.bad_blocks()) == ({"s"}, {"r"}, {2, 3, 4})
    assert bench.transfers.closed == 1
    assert bench.side.abandon() == (set(), set())
    assert bench.transfers.closed == 1


def test_what_a_failing_step_would_have_reported_is_not_forgotten() -> None:
    bench = Bench()
    bench.side.take_over(plan(load(), released=("x",)))

    assert bench.side.abandon() == ({"x"}, {"r"})
    assert bench.side.bad_blocks() == {1, 2, 3, 4}


def test_blocks_that_are_no_chunk_are_our_error() -> None:
    with pytest.raises(ValueError, match="no chunk"):
        Bench().side.load(StepPlan(chunk_tokens=2 * CHUNK, loads=(load(),)))


# --- several groups --------------------------------------------------------------------------------------------------

FULL, WINDOW, STATE = (
    GroupFacts(planes=(), block_tokens=BLOCK),
    GroupFacts(planes=(), block_tokens=BLOCK, kind=GroupKind.WINDOW, window_tokens=8, number=1),
    GroupFacts(planes=(), block_tokens=CHUNK, kind=GroupKind.STATE, number=3),
)
HYBRID = (FULL, WINDOW, STATE)


def test_each_group_of_a_load_is_a_job_and_the_load_ends_with_the_last() -> None:
    bench = Bench(groups=HYBRID)
    window, state = replace(load(), group=1), replace(load(), group=3, blocks=np.array([9], dtype="<i8").tobytes())

    bench.step(plan(load(), window, state))

    assert [(job.group, job.block_ids.shape) for job in bench.transfers.loads] == [
        (0, (1, 4)),
        (1, (1, 4)),
        (2, (1, 1)),
    ]
    assert bench.side.counters()["loads_in_flight"] == 1


@pytest.mark.behaviour("D054")
def test_a_failed_load_of_several_groups_names_its_request_and_no_block() -> None:
    bench = Bench(groups=HYBRID)
    bench.step(plan(load(), replace(load(), group=1)))
    bench.transfers.end_load("r", bad={1, 2})

    assert bench.step(plan(idle=True)) == (set(), {"r"}, set())
    assert bench.side.failed_requests() == {"r"}
    assert bench.side.failed_requests() == set()
    assert bench.side.counters()["failed_loads"] == 1


def test_a_failed_load_of_one_group_names_blocks_and_no_request() -> None:
    bench = Bench()
    bench.step(plan(load()))
    bench.transfers.end_load("r", bad={1, 2})

    assert bench.step(plan(idle=True)) == (set(), {"r"}, {1, 2})
    assert bench.side.failed_requests() == set()


def test_a_stage_without_a_loads_groups_reports_it_at_once() -> None:
    bench = Bench(groups=(STATE,))

    assert bench.step(plan(load(), idle=True))[1] == {"r"}
    assert bench.transfers.loads == []
    bench.step(plan(store()))
    assert bench.transfers.stores == []


def test_blocks_that_the_engine_takes_back_are_read_before_the_next_step_or_not_at_all() -> None:
    bench = Bench(groups=HYBRID)
    bench.step(plan(store(), replace(store(), group=1), replace(store(), group=3)))
    assert bench.transfers.settled == []

    bench.step(plan(idle=True))
    assert bench.transfers.settled == [], "nothing is overwritten in an idle step"
    bench.step(plan())
    assert bench.transfers.settled == [[1, 2]], "the blocks of full attention are the request's until its end"
    bench.step(plan())
    assert bench.transfers.settled == [[1, 2]]


def test_what_was_read_needs_no_waiting() -> None:
    bench = Bench(groups=HYBRID)
    bench.step(plan(replace(store(), group=1)))
    for job in bench.transfers.stores:
        job.gathered.set()

    bench.step(plan())

    assert bench.transfers.settled == []


def test_a_gather_that_cannot_be_ended_turns_the_half_off() -> None:
    bench = Bench(groups=HYBRID)
    bench.step(plan(replace(store(), group=1)))
    bench.transfers.cancels = False

    with pytest.raises(TimeoutError, match="taken back"):
        bench.side.preempt(plan())
