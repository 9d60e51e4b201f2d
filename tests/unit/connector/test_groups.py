# SPDX-License-Identifier: Apache-2.0
"""Which blocks hold a chunk, for each kind of cache group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.connector.groups import Part, blocks_per_chunk, load_part, store_parts
from kvpool.connector.plan import GroupFacts
from kvpool.model.identity import GroupKind
from kvpool.model.layout import NOWHERE

CHUNK = 16
FULL = GroupFacts(planes=(), block_tokens=4)
STATE = GroupFacts(planes=(), block_tokens=8, kind=GroupKind.STATE, number=2)


def window(tokens, block_tokens=4):
    return GroupFacts(planes=(), block_tokens=block_tokens, kind=GroupKind.WINDOW, window_tokens=tokens, number=1)


def ids(part):
    return np.frombuffer(part.blocks, dtype="<i8").tolist()


def seen(part):
    return part and (part.first, part.end, part.skip_blocks, ids(part)[part.skip_blocks :])


def table(blocks, missing=0):
    """Blocks 1, 2, ..., of which the first ones are gone."""
    return [0] * missing + list(range(missing + 1, blocks + 1))


def test_blocks_of_a_chunk() -> None:
    assert [blocks_per_chunk(g, CHUNK) for g in (FULL, window(8), window(8, 8), STATE)] == [4, 4, 2, 1]


@pytest.mark.parametrize(
    ("group", "blocks", "local", "expected"),
    [
        (FULL, table(12), 0, (0, 3, 0, list(range(1, 13)))),
        (FULL, table(12), 20, (1, 3, 1, list(range(6, 13)))),
        # Eight tokens before the end are two blocks; the chunk's others are not there.
        (window(8), table(12, 10), 0, (2, 3, 2, [11, 12])),
        # A window of 24 tokens needs two chunks, the first of them in part.
        (window(24), table(12, 6), 0, (1, 3, 2, list(range(7, 13)))),
        # What the engine has itself is not written, also inside the window.
        (window(24), table(12, 6), 32, (2, 3, 0, [9, 10, 11, 12])),
        (window(24), table(12, 6), 40, (2, 3, 2, [11, 12])),
        (STATE, [0, 0, 0, 0, 0, 6], 0, (2, 3, 0, [6])),
        (STATE, [0, 2, 0, 0, 0, 6], 16, (2, 3, 0, [6])),
    ],
)
@pytest.mark.behaviour("R033")
def test_a_load_writes_what_the_prefix_needs_and_nothing_else(group, blocks, local, expected) -> None:
    assert seen(load_part(group, blocks, (local // CHUNK, 3), CHUNK, local)) == expected


@pytest.mark.parametrize(
    ("group", "blocks"),
    [(FULL, [*table(11), 0]), (FULL, table(11)), (window(8), [*table(11, 9), 0]), (STATE, [0] * 6), (STATE, [0] * 5)],
)
def test_a_load_without_a_block_to_write_to_is_our_error(group, blocks) -> None:
    with pytest.raises(ValueError, match=r"missing|not all|no place"):
        load_part(group, blocks, (0, 3), CHUNK, 0)


def test_a_window_that_the_engine_holds_itself_is_not_loaded() -> None:
    assert load_part(window(8), [0] * 12, (2, 3), CHUNK, 32) is None


@pytest.mark.parametrize(
    ("group", "blocks", "expected"),
    [
        (FULL, table(12), [(1, 3, [5, 6, 7, 8, 9, 10, 11, 12])]),
        (window(24), table(12), [(1, 3, [5, 6, 7, 8, 9, 10, 11, 12])]),
        # The first blocks of a chunk may be gone if no prefix that ends with it needs them.
        (window(8), table(12, 6), [(1, 3, [NOWHERE, NOWHERE, 7, 8, 9, 10, 11, 12])]),
        (window(8), table(12, 7), [(2, 3, [9, 10, 11, 12])]),
        (window(24), table(12, 5), [(2, 3, [9, 10, 11, 12])]),
        (window(8), [0] * 12, []),
    ],
)
def test_a_store_keeps_what_is_whole(group, blocks, expected) -> None:
    parts = store_parts(group, blocks, (1, 3), CHUNK, {})

    assert [(part.first, part.end, ids(part)) for part in parts] == expected


def test_states_are_stored_where_the_engine_saved_one_at_a_chunks_end() -> None:
    states = {8: 1, 16: 2, 24: 3, 48: 6, 64: 7, 32: 0}

    parts = [*store_parts(STATE, [], (0, 3), CHUNK, states)]

    assert parts == [Part(0, 1, ids_of(2)), Part(2, 3, ids_of(6))], "not inside a chunk, nor beyond what is kept"


def ids_of(*blocks):
    return np.array(blocks, dtype="<i8").tobytes()


@given(
    window_tokens=st.integers(1, 80),
    before=st.integers(0, 100),
    new=st.integers(1, 60),
    block_tokens=st.sampled_from([4, 8, 16]),
)
def test_what_a_step_completes_is_what_a_load_of_that_prefix_needs(window_tokens, before, new, block_tokens) -> None:
    """The engine drops blocks outside of the window before a step; what it still has suffices whoever loads later."""
    group, after = window(window_tokens, block_tokens), before + new
    gone = max(0, before - window_tokens + 1) // block_tokens
    blocks = table(-(-after // block_tokens), gone)
    first, end = before // CHUNK, after // CHUNK

    stored = {}
    for part in store_parts(group, blocks, (first, end), CHUNK, {}) if end > first else ():
        per_chunk = len(ids(part)) // (part.end - part.first)
        for place, block in enumerate(ids(part)):
            stored[part.first * per_chunk + place] = block

    for chunk in range(first, end):
        tokens = (chunk + 1) * CHUNK
        skipped = max(0, tokens - window_tokens + 1) // block_tokens
        loading = [0] * skipped + [100 + i for i in range(skipped, tokens // block_tokens)]
        needed = load_part(group, loading, (chunk, chunk + 1), CHUNK, 0)
        if needed is not None:
            places = range(needed.first * (CHUNK // block_tokens) + needed.skip_blocks, tokens // block_tokens)
            assert all(stored[place] == place + 1 for place in places)
