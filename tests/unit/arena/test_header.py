# SPDX-License-Identifier: Apache-2.0
"""A process killed anywhere between or within the stores of a change leaves old, new or empty headers."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.fakes.arenas_on_disk import rows_of

from kvpool.arena.header import HEADER_BYTES, HEADER_WORDS, SlotState, Store, apply, erasing, read_rows, rewriting, scan
from kvpool.arena.page import Cut, cutting, identity_page
from kvpool.arena.sizes import Sizes

GOLDEN = Path(__file__).parents[2] / "golden" / "arena_headers.txt"

Table = NDArray[np.uint64]
SLOTS = np.array([2, 0], dtype=np.int64)
"""Changed together; slot 1 stands between them and never changes."""

EMPTY = ("empty", b"")


def outcome(table: Table) -> list[tuple[str, bytes]]:
    """What a server that starts now would make of each slot."""
    found = scan(table)
    states = [EMPTY] * len(table)
    for name, slots, rows in (("ready", found.ready, found.ready_rows), ("writing", found.writing, found.writing_rows)):
        for slot, row in zip(slots.tolist(), rows, strict=True):
            states[slot] = (name, row.tobytes())
    return states


def old_tables() -> Iterator[Table]:
    for state in (None, SlotState.WRITING, SlotState.READY):
        table = np.zeros((3, HEADER_WORDS), dtype=np.uint64)
        apply(table, np.array([1]), rewriting(rows_of(77), SlotState.READY, 40))
        if state is not None:
            apply(table, SLOTS, rewriting(rows_of(5, 6), state, 50))
        yield table
        erased = table.copy()
        apply(erased, SLOTS, erasing(2))
        yield erased


CHANGES = {
    "begin": rewriting(rows_of(8, 9), SlotState.WRITING, 60),
    "commit": rewriting(rows_of(5, 6), SlotState.READY, 60),
    "erase": erasing(2),
}
CASES = [(name, table) for name in CHANGES for table in old_tables()]


def cells(step: Store) -> list[tuple[int, int, int]]:
    """All words that a step stores, as (slot, word, value)."""
    values = step.values.reshape(len(SLOTS), -1)
    return [
        (int(SLOTS[i]), step.first + j, int(values[i, j]))
        for i, j in itertools.product(*(range(n) for n in values.shape))
    ]


def stored(table: Table, some: list[tuple[int, int, int]]) -> Table:
    torn = table.copy()
    for slot, word, value in some:
        torn[slot, word] = value
    return torn


def check_is_old_new_or_empty(table: Table, old: Table, new: Table) -> None:
    for now, before, after in zip(outcome(table), outcome(old), outcome(new), strict=True):
        assert now in (before, after, EMPTY)
    assert outcome(table)[1] == outcome(old)[1] != EMPTY


@pytest.mark.parametrize(("change", "old"), CASES)
def test_a_crash_at_any_store_leaves_old_new_or_empty(change: str, old: Table) -> None:
    new = old.copy()
    apply(new, SLOTS, CHANGES[change])
    before = old
    for step in CHANGES[change]:
        words = cells(step)
        for n in range(len(words) + 1):
            check_is_old_new_or_empty(stored(before, words[:n]), old, new)
            check_is_old_new_or_empty(stored(before, words[n:]), old, new)
        for one in words:
            check_is_old_new_or_empty(stored(before, [one]), old, new)
        before = stored(before, words)
    assert np.array_equal(before, new), "the steps are all that apply does"


@given(st.sampled_from(CASES), st.data())
def test_a_crash_within_a_store_leaves_old_new_or_empty_for_any_subset_of_words(
    case: tuple[str, Table], data: st.DataObject
) -> None:
    change, old = case
    new = old.copy()
    apply(new, SLOTS, CHANGES[change])
    done = data.draw(st.integers(0, len(CHANGES[change]) - 1))
    before = old.copy()
    apply(before, SLOTS, CHANGES[change][:done])
    words = cells(CHANGES[change][done])
    some = [w for w in words if data.draw(st.booleans())]

    check_is_old_new_or_empty(stored(before, some), old, new)


@given(st.sampled_from(CASES), st.data())
def test_even_a_store_torn_within_a_word_is_never_ready_with_a_mixture(
    case: tuple[str, Table], data: st.DataObject
) -> None:
    change, old = case
    new = old.copy()
    apply(new, SLOTS, CHANGES[change])
    done = data.draw(st.integers(0, len(CHANGES[change]) - 1))
    before, after = old.copy(), old.copy()
    apply(before, SLOTS, CHANGES[change][:done])
    apply(after, SLOTS, CHANGES[change][: done + 1])
    mask = np.frombuffer(data.draw(st.binary(min_size=before.nbytes, max_size=before.nbytes)), dtype=np.uint8) & 1
    torn = np.where(mask.astype(bool), after.view(np.uint8).ravel(), before.view(np.uint8).ravel())

    allowed = [outcome(old), outcome(new)]
    for slot, now in enumerate(outcome(torn.view(np.uint64).reshape(before.shape))):
        assert now in (allowed[0][slot], allowed[1][slot], EMPTY, ("writing", bytes(145)))


def test_a_change_begins_by_emptying_and_ends_with_the_mark() -> None:
    steps = rewriting(rows_of(1), SlotState.READY, 3)

    assert [(s.first, s.values.ndim) for s in steps] == [(0, 1), (1, 2), (0, 1)]
    assert steps[0].values.tolist() == [0]
    assert steps[2].values.tolist() == [3 << 8 | SlotState.READY]


def test_ready_slots_come_oldest_first_and_the_highest_sequence_is_known() -> None:
    table = np.zeros((10, HEADER_WORDS), dtype=np.uint64)
    apply(table, np.array([7, 3]), rewriting(rows_of(1, 2), SlotState.READY, 20))
    apply(table, np.array([9]), rewriting(rows_of(3), SlotState.READY, 4))
    apply(table, np.array([0]), rewriting(rows_of(4), SlotState.WRITING, 30))

    found = scan(table)

    assert found.ready.tolist() == [9, 7, 3]
    assert np.array_equal(found.ready_rows, rows_of(3, 1, 2))
    assert found.writing.tolist() == [0]
    assert found.sequence == 30


def test_a_damaged_header_is_held_by_somebody_and_has_no_row() -> None:
    table = np.zeros((2, HEADER_WORDS), dtype=np.uint64)
    apply(table, np.array([0, 1]), rewriting(rows_of(1, 2), SlotState.READY, 1))
    table[0, 9] ^= np.uint64(1)

    found = scan(table)

    assert found.ready.tolist() == [1]
    assert found.writing.tolist() == [0]
    assert found.writing_rows.tobytes() == bytes(145)


def test_rows_come_back_as_they_were_given() -> None:
    table = np.zeros((4, HEADER_WORDS), dtype=np.uint64)
    apply(table, np.array([3, 1]), rewriting(rows_of(11, 12), SlotState.WRITING, 1))

    assert np.array_equal(read_rows(table, np.array([1, 3])), rows_of(12, 11))


def test_header_bytes_are_as_released() -> None:
    """Changing these bytes needs a new LAYOUT_VERSION: a server would misread what its predecessor left."""
    assert HEADER_BYTES <= 192
    table = np.zeros((2, HEADER_WORDS), dtype=np.uint64)
    apply(table, np.array([0]), rewriting(rows_of(1), SlotState.WRITING, 0x010203))
    apply(table, np.array([1]), rewriting(rows_of(2), SlotState.READY, 0x040506))
    cut = b"".join(s.values.tobytes() for s in cutting(Cut(slot_bytes=65536, slots=64, owner="team-a"))[1:])
    sizes = Sizes(regions=4, region_bytes=4 << 20)

    lines = [
        f"writing {table[0].tobytes().hex()}",
        f"ready {table[1].tobytes().hex()}",
        f"cut {cut[:64].hex()}",
        f"identity {identity_page('pool-1', 3, sizes)[:112].hex()}",
    ]

    assert lines == GOLDEN.read_text().splitlines()
