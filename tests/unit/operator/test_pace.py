# SPDX-License-Identifier: Apache-2.0
"""How often a status is written: news soon, numbers ever more seldom, and never more than once in a gap."""

from dataclasses import dataclass, field

import pytest
from tests.unit.operator.cases import with_identity

from kvpool_operator.observed import DaemonSetState, Observed, ServerPod
from kvpool_operator.pace import Pace, flips, news, stories, tally
from kvpool_operator.spec import PoolStatus, parse_pool
from kvpool_operator.status import Progress, status

GAP_S = 5.0


@dataclass
class Writer:
    """Offers a status every second, as a busy pool does."""

    pace: Pace = field(default_factory=lambda: Pace(GAP_S))
    now_s: float = 0.0
    writes: list[float] = field(default_factory=list)

    def offer(self, seconds: int, *, new: bool = False) -> None:
        for _ in range(seconds):
            if self.pace.due(self.now_s, new=new):
                self.pace.written(self.now_s, new=new)
                self.writes.append(self.now_s)
            self.now_s += 1.0

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def test_the_first_write_is_due_at_once_and_the_next_after_the_gap() -> None:
    writer = Writer()

    writer.offer(1, new=True)
    writer.offer(4, new=True)
    assert writer.writes == [0.0]
    writer.offer(1, new=True)
    assert writer.writes == [0.0, 5.0]


def test_numbers_that_count_on_are_written_ever_more_seldom_but_every_two_minutes() -> None:
    writer = Writer()
    writer.offer(1, new=True)

    writer.offer(600)

    assert writer.writes[:5] == [0.0, 15.0, 60.0, 180.0, 300.0]
    gaps = [b - a for a, b in zip(writer.writes, writer.writes[1:], strict=False)]
    assert max(gaps) == 120.0


def test_news_need_not_wait_for_the_longer_gap_and_set_it_back() -> None:
    writer = Writer()
    writer.offer(1, new=True)
    writer.offer(100)
    before = len(writer.writes)

    writer.offer(1, new=True)
    writer.offer(16)

    assert len(writer.writes) == before + 2


def test_a_rest_with_nothing_to_say_sets_the_gap_back() -> None:
    writer = Writer()
    writer.offer(1, new=True)
    writer.offer(100)
    writer.wait(1000.0)
    writer.pace.rest(writer.now_s)
    before = len(writer.writes)

    writer.offer(16)

    assert len(writer.writes) == before + 2


def test_passes_that_come_late_do_not_set_the_gap_back() -> None:
    """On a busy machine they do, and a change would cost a write for each of them."""
    writer = Writer()
    writer.offer(1, new=True)
    for _ in range(12):
        writer.wait(39.0)
        writer.offer(1)

    assert writer.writes == [0.0, 40.0, 120.0, 240.0, 360.0, 480.0]


def judged(*ready: bool, generation: int = 1, before: PoolStatus | None = None, settled: bool = True) -> PoolStatus:
    body = with_identity({"metadata": {"name": "a", "generation": generation}, "spec": {"l1": {"size": "1Gi"}}})
    pods = [ServerPod(name=f"s{i}", uid=f"{i}", node=f"n{i}", revision="r", ready=r) for i, r in enumerate(ready)]
    state = DaemonSetState(generation=2, observed_generation=2 if settled else 1, desired=len(pods), revision="r")
    seen = Observed(daemon_set=state, servers=tuple(pods))
    return status(parse_pool(body), seen, Progress("UpToDate"), before or PoolStatus(), "2030-01-01T00:00:00Z")


def test_other_numbers_alone_are_no_news() -> None:
    before = judged(True, False, False)
    made = judged(True, True, False, before=before)

    assert made != before
    assert not news(before, made)
    assert flips(before, made) == ()


@pytest.mark.parametrize(
    ("made", "flipped"),
    [
        (judged(True, True, before=judged(True, False)), {"Ready", "Progressing", "Degraded"}),
        (judged(True, False, generation=2), set()),
    ],
    ids=["a condition flips", "another spec"],
)
def test_what_is_news(made: PoolStatus, flipped: set[str]) -> None:
    before = judged(True, False)

    assert news(before, made)
    assert {c.type for c in flips(before, made)} == flipped


def test_a_first_status_is_news_and_flips_nothing() -> None:
    assert news(PoolStatus(), judged(True))
    assert flips(PoolStatus(), judged(True)) == ()


def test_what_ready_says_is_not_said_again() -> None:
    waiting, ready = judged(True, False), judged(True, True, before=judged(True, False))

    assert [c.type for c in stories(flips(waiting, ready))] == ["Ready", "Degraded"]
    back = judged(True, False, before=ready)
    assert {c.type for c in flips(ready, back)} == {"Ready", "Progressing", "Degraded"}
    assert [c.type for c in stories(flips(ready, back))] == ["Ready", "Degraded"]
    assert stories(()) == ()


def test_what_has_counted_to_its_end_is_written_sooner() -> None:
    writer = Writer()
    writer.offer(1, new=True)
    writer.offer(200)
    since_s = writer.now_s - writer.writes[-1]
    pace = writer.pace

    assert not pace.due(writer.now_s, new=False)
    assert not pace.due(writer.now_s + 29.0 - since_s, new=False, final=True)
    assert pace.due(writer.now_s + 30.0 - since_s, new=False, final=True)


def test_a_tally_is_steady_once_it_was_the_same_for_the_gap() -> None:
    pace = Pace(GAP_S)

    assert not pace.steady(100.0, ("a",))
    assert not pace.steady(104.0, ("a",))
    assert pace.steady(105.0, ("a",))
    assert not pace.steady(106.0, ("b",))


def test_a_tally_counts_pods_and_there_is_none_while_a_rollout_goes_on() -> None:
    at_rest = judged(True, True)

    assert tally(judged(True, False)) is None
    assert tally(PoolStatus()) is None
    assert tally(at_rest) == tally(judged(True, True, before=at_rest))
    assert tally(at_rest) != tally(judged(True, True, True))
