# SPDX-License-Identifier: Apache-2.0
"""How long the engine's thread may wait for the cache."""

import pytest

from kvpool.connector.patience import Patience


def test_waiting_takes_a_share_of_the_time_and_no_more_than_a_bound_at_once() -> None:
    patience = Patience(share=0.1, most_s=1.0)

    assert patience.left_s(0.0) == 1.0
    patience.spent(1.0)
    assert patience.left_s(0.0) == 0.0
    assert patience.left_s(5.0) == pytest.approx(0.5)
    assert patience.left_s(1000.0) == 1.0


def test_a_wait_that_took_too_long_is_paid_back() -> None:
    patience = Patience(share=0.1, most_s=1.0)
    patience.left_s(0.0)
    patience.spent(3.0)

    assert patience.left_s(10.0) == 0.0
    assert patience.left_s(25.0) == pytest.approx(0.5)
