# SPDX-License-Identifier: Apache-2.0
"""Loads that are expected to be slower than computing are not made, and it is noticed when that changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.connector.rates import TRY_EVERY, Line, Rates


def test_a_line_finds_start_and_rate() -> None:
    line = Line()
    for tokens in (256, 1024, 512, 2048):
        line.add(tokens, 0.01 + tokens / 10_000)

    assert line.seconds(4096) == pytest.approx(0.01 + 0.4096)


def test_samples_of_one_size_are_a_rate() -> None:
    line = Line()
    for _ in range(5):
        line.add(1000, 0.5)

    assert line.seconds(2000) == pytest.approx(1.0)


def test_old_samples_fade() -> None:
    line = Line()
    for _ in range(50):
        line.add(1000, 9.0)
    for _ in range(50):
        line.add(1000, 1.0)

    assert line.seconds(1000) == pytest.approx(1.0, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 1 << 17), st.floats(0, 60)), min_size=1, max_size=30), st.integers(1, 1 << 17))
def test_no_samples_make_a_time_that_is_negative_or_endless(samples, tokens) -> None:
    line = Line()
    for count, seconds in samples:
        line.add(count, seconds)

    assert 0 <= line.seconds(tokens) < float("inf")


def measured(load_s, compute_s, budget=1.0):
    """Rates after some loads and prompts of 1000 tokens that took so long."""
    rates = Rates(budget)
    now_s = 0.0
    for number in range(5):
        rates.load_began(f"r{number}", 1000, now_s)
        rates.load_ended(f"r{number}", now_s + load_s, well=True)
        rates.step_began(1000, now_s + load_s)
        now_s += load_s + compute_s
        rates.step_ended(now_s)
    return rates


@pytest.mark.parametrize(
    ("load_s", "compute_s", "budget", "worth"),
    [
        (0.1, 1.0, 1.0, True),
        (1.0, 0.1, 1.0, False),
        (1.0, 0.1, 0.0, True),
        (1.0, 0.6, 2.0, True),
        (1.0, 0.4, 2.0, False),
    ],
)
def test_a_load_is_made_if_it_is_expected_to_be_within_its_budget(load_s, compute_s, budget, worth) -> None:
    assert measured(load_s, compute_s, budget).worth(500) is worth


def test_before_there_are_samples_of_both_all_is_loaded() -> None:
    rates = Rates(1.0)
    for number in range(9):
        rates.load_began(f"r{number}", 1000, 0.0)
        rates.load_ended(f"r{number}", 100.0, well=True)

    assert rates.worth(1000)


def test_some_loads_are_tried_all_the_same_and_a_server_that_is_quick_again_is_noticed() -> None:
    rates = measured(1.0, 0.1)
    made = 0
    for number in range(20 * TRY_EVERY):
        if rates.worth(1000):
            made += 1
            rates.load_began(f"t{number}", 1000, 0.0)
            rates.load_ended(f"t{number}", 0.01, well=True)
        else:
            rates.refuse()

    assert rates.loads.seconds(1000) < 0.1
    assert made > 40, "not only every sixteenth"


def test_failed_and_aborted_loads_are_no_samples() -> None:
    rates = Rates(1.0)
    rates.load_began("failed", 1000, 0.0)
    rates.load_ended("failed", 1.0, well=False)
    rates.load_began("aborted", 1000, 0.0)
    rates.forget("aborted")
    rates.load_ended("aborted", 1.0, well=True)

    assert rates.loads.samples == 0


def test_steps_that_overlap_are_timed_from_the_end_of_the_one_before() -> None:
    rates = Rates(1.0)
    for number in range(4):
        rates.step_began(1000, number * 0.001)
    for number in range(4):
        rates.step_ended(0.5 * (number + 1))

    assert rates.prompts.seconds(1000) == pytest.approx(0.5, rel=0.05)


def test_steps_of_few_tokens_and_steps_without_a_model_are_no_samples() -> None:
    rates = Rates(1.0)
    rates.step_began(3, 0.0)
    rates.step_ended(1.0)
    rates.step_began(1000, 1.0)
    rates.step_began(0, 1.1)
    rates.step_ended(2.0)
    rates.step_ended(3.0)

    assert rates.prompts.samples == 0
