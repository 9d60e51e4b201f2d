# SPDX-License-Identifier: Apache-2.0
"""The merging queue: its schedule without a clock, then the runner on a loop."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.queue import Need, Outcome, Queue, Schedule

OK = Outcome()
FAILED = Outcome(failed=True)


def schedule(**changes: object) -> Schedule[str]:
    known: dict[str, object] = {"gap_s": 1.0, "report_gap_s": 5.0, "parallel": 2, "jitter": lambda: 0.0}
    return Schedule(**(known | changes))  # type: ignore[arg-type]


def test_equal_keys_merge() -> None:
    s = schedule()
    for _ in range(5):
        s.add("a", 0.0)

    assert s.take(0.0) == "a"
    assert s.take(0.0) is None


def test_what_is_asked_for_during_a_pass_comes_after_it() -> None:
    s = schedule()
    s.add("a", 0.0)
    s.take(0.0)
    s.add("a", 0.5)

    assert s.take(0.5) is None, "never two passes over one key at a time"
    s.done("a", 2.0, OK)
    assert s.take(2.5) is None, "a burst waits for the gap"
    assert s.take(3.0) == "a"


def test_what_is_only_to_be_reported_waits_longer_after_a_pass_unless_something_else_asks() -> None:
    s = schedule()
    s.add("a", 0.0, Need.SOMETIME)
    assert s.take(0.0) == "a", "after a quiet time at once"
    s.add("a", 0.5, Need.SOMETIME)
    s.done("a", 1.0, OK)
    assert s.take(5.9) is None
    assert s.take(6.0) == "a"
    s.done("a", 6.0, OK)
    s.add("a", 6.1, Need.SOMETIME)
    s.add("a", 6.2)
    assert s.take(7.0) == "a"


def test_a_pass_that_wants_another_one_soon_gets_it_whatever_was_reported_meanwhile() -> None:
    s = schedule()
    s.add("a", 0.0)
    s.take(0.0)
    s.add("a", 0.5, Need.SOMETIME)
    s.done("a", 1.0, Outcome(after_s=2.0))

    assert s.take(2.9) is None
    assert s.take(3.0) == "a"


def test_no_more_than_so_many_at_a_time() -> None:
    s = schedule(parallel=2)
    for key in "abc":
        s.add(key, 0.0)

    assert {s.take(0.0), s.take(0.0)} == {"a", "b"}
    assert s.take(0.0) is None
    s.done("a", 0.1, OK)
    assert s.take(0.1) == "c"


def test_failures_back_off_twice_as_long_each_time_up_to_five_minutes() -> None:
    s = schedule()
    s.add("a", 0.0)
    now, waits = 0.0, []
    for _ in range(14):
        assert s.take(now) == "a"
        s.done("a", now, FAILED)
        due = s.next_due_s()
        assert due is not None
        waits.append(round(due - now, 3))
        now = due

    assert waits[:4] == [0.2, 0.4, 0.8, 1.6]
    assert waits[-1] == 300.0


def test_a_failing_key_is_not_hurried_by_events_but_by_a_new_spec() -> None:
    s = schedule()
    s.add("a", 0.0)
    for now in (0.0, 10.0, 20.0, 30.0, 40.0, 50.0):
        assert s.take(now) == "a"
        s.done("a", now, FAILED)
    due = s.next_due_s()
    assert due == pytest.approx(56.4)

    s.add("a", 51.0)
    assert s.next_due_s() == due
    s.add("a", 52.0, Need.NOW)
    assert s.take(52.0) == "a"


def test_a_server_that_asks_to_wait_is_waited_for() -> None:
    s = schedule()
    s.add("a", 0.0)
    s.take(0.0)
    s.done("a", 0.0, Outcome(failed=True, after_s=30.0))

    assert s.next_due_s() == 30.0


def test_a_forgotten_key_is_gone_unless_it_was_asked_for_again() -> None:
    s = schedule()
    s.add("a", 0.0)
    s.take(0.0)
    s.done("a", 0.0, Outcome(forget=True))
    assert len(s) == 0

    s.add("a", 1.0)
    s.take(1.0)
    s.add("a", 1.0)
    s.done("a", 1.0, Outcome(forget=True))
    assert s.take(2.0) == "a"


def test_the_oldest_wait_counts_only_what_is_overdue() -> None:
    s = schedule(parallel=1)
    s.add("a", 0.0)
    s.add("b", 3.0)
    s.take(0.0)

    assert s.oldest_wait_s(10.0) == 7.0
    s.done("a", 10.0, Outcome(after_s=100.0))
    s.take(10.0)
    assert s.oldest_wait_s(50.0) == 0.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["soon", "now", "sometime", "take", "ok", "fail", "forget", "later"]),
            st.sampled_from("abc"),
            st.floats(0, 5),
        ),
        max_size=60,
    )
)
def test_whatever_is_asked_for_is_looked_at_afterwards(steps: list[tuple[str, str, float]]) -> None:
    s, now, running, owed = schedule(), 0.0, set[str](), set[str]()
    outcomes = {"ok": OK, "fail": FAILED, "forget": Outcome(forget=True), "later": Outcome(after_s=1.0)}
    for step, key, passed_s in steps:
        now += passed_s
        if step in ("soon", "now", "sometime"):
            s.add(key, now, Need(step))
            owed.add(key)
        elif step == "take":
            taken = s.take(now)
            if taken is not None:
                assert taken not in running
                running.add(taken)
                owed.discard(taken)
        elif key in running:
            running.discard(key)
            s.done(key, now, outcomes[step])
            if step == "fail":
                owed.add(key)
        assert len(running) <= 2

    for key in sorted(running):
        s.done(key, now, OK)
    looked_at = set()
    while (due := s.next_due_s()) is not None and due < now + 10_000:
        now = max(now, due)
        taken = s.take(now)
        assert taken is not None
        looked_at.add(taken)
        s.done(taken, now, OK)
    assert owed <= looked_at


class Loop:
    """A queue on a running loop whose passes end when the test says so."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.ends: dict[str, asyncio.Future[Outcome]] = {}
        self.queue: Queue[str] = Queue(schedule(gap_s=0.0), self._work, clock)

    async def _work(self, key: str) -> Outcome:
        self.ends[key] = asyncio.get_running_loop().create_future()
        await self.started.put(key)
        return await self.ends[key]


async def on_a_loop(test: Callable[[Loop], object]) -> None:
    loop = Loop(asyncio.get_running_loop().time)
    running = asyncio.create_task(loop.queue.run())
    try:
        async with asyncio.timeout(10):
            await test(loop)  # type: ignore[misc]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_the_runner_wakes_for_new_keys_and_ends() -> None:
    async def check(loop: Loop) -> None:
        loop.queue.add("a")
        loop.queue.add("b")
        loop.queue.add("c")
        assert {await loop.started.get(), await loop.started.get()} == {"a", "b"}
        assert loop.started.empty(), "two at a time"
        loop.ends["b"].set_result(OK)
        assert await loop.started.get() == "c"
        loop.queue.add("a")
        loop.ends["a"].set_result(OK)
        assert await loop.started.get() == "a"

    asyncio.run(on_a_loop(check))


def test_the_runner_comes_back_by_itself() -> None:
    async def check(loop: Loop) -> None:
        loop.queue.add("a")
        for outcome in (Outcome(after_s=0.01), FAILED, OK):
            assert await loop.started.get() == "a"
            loop.ends["a"].set_result(outcome)

    asyncio.run(on_a_loop(check))
