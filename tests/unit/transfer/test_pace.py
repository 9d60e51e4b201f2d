# SPDX-License-Identifier: Apache-2.0
"""Sleeping before spinning: never past the end of a copy that is as quick as those before."""

from kvpool.transfer.mover.pace import Pace


def test_nothing_is_known_of_the_first_copy() -> None:
    assert Pace().sleep_s(1 << 25, 10.0, 10.0) == 0.0


def test_most_of_a_copy_that_just_began_is_slept() -> None:
    pace = Pace()
    pace.ended(1000, 10.0, 11.0)

    assert abs(pace.sleep_s(1000, 10.5, 11.0) - 0.6) < 1e-9
    assert abs(pace.sleep_s(1000, 10.5, 11.4) - 0.2) < 1e-9
    assert pace.sleep_s(1000, 10.5, 11.7) == 0.0


def test_a_copy_begins_when_it_is_queued_or_the_one_before_ended() -> None:
    pace = Pace()
    pace.ended(1000, 10.0, 11.0)

    assert abs(pace.sleep_s(1000, 20.0, 20.1) - 0.5) < 1e-9


def test_what_would_end_while_waking_up_is_not_slept() -> None:
    pace = Pace()
    pace.ended(1 << 25, 10.0, 10.0006)

    assert pace.sleep_s(1 << 20, 10.0, 10.0006) == 0.0


def test_a_quicker_copy_counts_at_once_and_a_slower_one_little() -> None:
    pace = Pace()
    pace.ended(1000, 10.0, 11.0)
    pace.ended(1000, 10.0, 11.5)
    assert abs(pace.sleep_s(1000, 10.0, 11.5) - 0.3) < 1e-9

    pace.ended(1000, 10.0, 13.5)
    assert 0.3 < pace.sleep_s(1000, 10.0, 13.5) < 0.6
