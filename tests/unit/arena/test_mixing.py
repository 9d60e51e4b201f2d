# SPDX-License-Identifier: Apache-2.0
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.arena.mixing import check_of

WORD = st.integers(0, (1 << 64) - 1)


def words(values: list[int]) -> np.ndarray:
    return np.array([values], dtype=np.uint64)


@given(st.lists(WORD, min_size=24, max_size=24), st.integers(0, 23), WORD)
def test_one_changed_word_always_changes_the_check(values: list[int], at: int, other: int) -> None:
    changed = [*values[:at], other, *values[at + 1 :]]

    assert (check_of(words(values))[0] == check_of(words(changed))[0]) == (values == changed)


@given(st.lists(WORD, min_size=24, max_size=24), st.integers(0, 23), st.integers(0, 23))
def test_exchanged_words_change_the_check(values: list[int], a: int, b: int) -> None:
    changed = list(values)
    changed[a], changed[b] = values[b], values[a]

    assert (check_of(words(values))[0] == check_of(words(changed))[0]) == (values == changed)


def test_each_header_has_its_own_check_whatever_stands_beside_it() -> None:
    table = np.random.default_rng(1).integers(0, 1 << 63, (5000, 24)).astype(np.uint64)

    checks = check_of(table)

    assert len(set(checks.tolist())) == 5000
    assert [int(check_of(table[i : i + 1])[0]) for i in (0, 2047, 2048, 4999)] == checks[[0, 2047, 2048, 4999]].tolist()


def test_no_headers_have_no_checks() -> None:
    assert check_of(np.empty((0, 24), dtype=np.uint64)).shape == (0,)
