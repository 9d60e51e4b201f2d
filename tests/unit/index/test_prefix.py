# SPDX-License-Identifier: Apache-2.0
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.index.prefix import longest, needed, pin_costs, restorable

TABLES = st.integers(1, 12).flatmap(
    lambda n: st.lists(
        st.tuples(st.lists(st.booleans(), min_size=n, max_size=n), st.integers(1, 14)), min_size=1, max_size=4
    )
)


@given(TABLES)
def test_a_length_is_restorable_if_and_only_if_each_table_has_what_it_needs(
    tables: list[tuple[list[bool], int]],
) -> None:
    ok = restorable([np.array(have) for have, _ in tables], [reach for _, reach in tables])

    for length in range(len(ok)):
        assert ok[length] == all(all(have[needed(length, reach)]) for have, reach in tables)


@given(TABLES)
def test_costs_are_the_sum_over_what_is_needed(tables: list[tuple[list[bool], int]]) -> None:
    new = [np.where(have, 0, 7 + at).astype(np.int64) for at, (have, _) in enumerate(tables)]

    costs = pin_costs(new, [reach for _, reach in tables])

    for length, cost in enumerate(costs.tolist()):
        assert cost == sum(int(n[needed(length, reach)].sum()) for n, (_, reach) in zip(new, tables, strict=True))


def test_longest_is_the_last_that_is_ok() -> None:
    assert longest(np.array([True, False, True, False])) == 2
    assert longest(np.array([True, False])) == 0
    assert longest(np.array([True, True])) == 1
