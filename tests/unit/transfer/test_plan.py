# SPDX-License-Identifier: Apache-2.0
"""Tables, parts and turns: every byte of a chunk moves once, whatever the slot's size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.transfer.plan import NOWHERE, parts_of, plane_table, slot_ids, turns_of
from kvpool.transfer.planes import Layout, LayoutError, Plane


def layout(*sizes: int, stride: int = 0) -> Layout:
    planes, at = [], 0
    for number, size in enumerate(sizes):
        step = stride or size
        planes.append(Plane(name=str(number), storage=0, offset=at, stride=step, block_bytes=size, packing="p"))
        at += 8 * step
    return Layout(planes=tuple(planes), blocks=8, block_tokens=16)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=5), st.integers(1, 6), st.integers(64, 4096))
def test_parts_cover_a_chunk_once_and_fit(sizes: list[int], blocks: int, slot_bytes: int) -> None:
    found = layout(*sizes)

    parts = parts_of(found, blocks, slot_bytes)

    at = 0
    for part in parts:
        assert part.offset == at
        assert 0 < part.length <= slot_bytes
        planes = sizes[part.first_plane : part.end_plane]
        assert part.length == sum(planes) * (part.end_block - part.first_block)
        at += part.length
    assert at == found.chunk_bytes(blocks)
    assert len(parts) == 1 or found.chunk_bytes(blocks) > slot_bytes


def test_a_block_that_fits_no_slot_is_refused_with_numbers() -> None:
    with pytest.raises(LayoutError, match="4096 bytes does not fit a ring slot of 1024"):
        parts_of(layout(512, 4096), 2, 1024)


def test_small_chunks_share_a_slot() -> None:
    parts = parts_of(layout(64, 64), 2, 1024)

    turns = list(turns_of([0, 2, 3, 5, 6, 7], parts, 1024))

    assert [t.chunks for t in turns] == [(0, 2, 3, 5), (6, 7)]
    assert [t.length for t in turns] == [1024, 512]


def test_a_large_chunk_takes_a_slot_for_each_part() -> None:
    parts = parts_of(layout(64, 64, 64), 4, 512)

    turns = list(turns_of([1, 4], parts, 512))

    assert [(t.chunks, t.part.offset, t.part.length) for t in turns] == [
        ((1,), 0, 512),
        ((1,), 512, 256),
        ((4,), 0, 512),
        ((4,), 512, 256),
    ]


def test_rows_of_a_table_are_pieces_in_the_order_of_the_bytes() -> None:
    table = plane_table(layout(96, 32, stride=128), [4096], piece_bytes=64)

    assert table.unit == 16
    assert table.rows.tolist() == [
        [4096, 128, 0, 96, 0, 8],
        [4096 + 64, 128, 0, 96, 64, 4],
        [4096 + 1024, 128, 96, 32, 0, 4],
    ]
    assert table.firsts.tolist() == [0, 2, 3]


@pytest.mark.parametrize(("address", "unit"), [(4096, 16), (4104, 8), (4098, 2), (4097, 1)])
def test_the_unit_divides_addresses_too(address: int, unit: int) -> None:
    table = plane_table(layout(32, 32), [address])

    assert table.unit == unit
    assert table.word_bytes == min(unit, 8)
    assert table.rows[:, 5].tolist() == [32 // min(unit, 8)] * 2


@pytest.mark.behaviour("D005", "D006")
@pytest.mark.parametrize(("ids", "error"), [([[0, 8]], IndexError), ([[-1, 2]], IndexError), ([[3], [3]], ValueError)])
def test_ids_are_refused_before_a_launch(ids: list[list[int]], error: type[Exception]) -> None:
    with pytest.raises(error):
        slot_ids(np.array(ids), 8)


def test_null_and_skipped_blocks_are_left_alone_and_not_looked_at() -> None:
    ids = slot_ids(np.array([[99, 5, 0], [0, 0, 7]]), 8, null_block=0, skip=np.array([1, 0]))

    assert ids.tolist() == [[NOWHERE, 5, NOWHERE], [NOWHERE, NOWHERE, 7]]
