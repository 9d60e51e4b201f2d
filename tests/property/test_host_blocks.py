# SPDX-License-Identifier: Apache-2.0
"""The host copies agree with their twin on random layouts, and refuse what it refuses."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.model.layout import NOWHERE
from kvpool.transfer import reference
from kvpool.transfer.host import HostBlocks
from kvpool.transfer.planes import Layout, PagedTensor, layout_of

BLOCKS = 7


@dataclass(frozen=True)
class Case:
    layout: Layout
    storages: list[np.ndarray]
    block_ids: np.ndarray
    skip_blocks: int

    def copies(self) -> list[np.ndarray]:
        return [s.copy() for s in self.storages]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Layers with gaps before, between and inside blocks, over one to three storages."""
    tensors, ends = [], [0] * draw(st.integers(1, 3))
    for number in range(draw(st.integers(1, 5))):
        storage = draw(st.integers(0, len(ends) - 1))
        inner = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        item = draw(st.sampled_from([1, 2, 4]))
        strides, step = [], item
        for length in reversed(inner):
            strides.insert(0, step)
            step *= length
            step += item * draw(st.integers(0, 1))
        rows = BLOCKS * draw(st.integers(1, 2))
        offset = ends[storage] + draw(st.integers(0, 5))
        tensors.append(
            PagedTensor(
                name=f"layer.{number}",
                storage=storage,
                offset=offset,
                shape=(rows, *inner),
                strides=(step, *strides),
                item_bytes=item,
                packing="p",
            )
        )
        ends[storage] = offset + rows * step
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    storages = [rng.integers(0, 256, end + 8, dtype=np.uint8) for end in ends]
    ids = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True))
    return Case(layout_of(tensors, BLOCKS, 4), storages, np.array(ids), draw(st.integers(0, len(ids) - 1)))


@given(cases())
def test_gather_is_the_twins(case: Case) -> None:
    size = case.layout.chunk_bytes(len(case.block_ids))
    expected, got = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    before = case.copies()

    reference.gather_blocks(case.storages, case.layout, case.block_ids, expected)
    HostBlocks([case.layout], case.storages).gather(0, case.block_ids, memoryview(got))

    assert got.tobytes() == expected.tobytes()
    assert all((a == b).all() for a, b in zip(before, case.storages, strict=True))


@given(cases(), st.data())
def test_blocks_that_are_nowhere_are_gathered_as_zeros(case: Case, data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.booleans(), min_size=len(case.block_ids), max_size=len(case.block_ids)))
    ids = np.where(gaps, NOWHERE, case.block_ids)
    expected, got = (np.full(case.layout.chunk_bytes(len(ids)), 7, np.uint8) for _ in range(2))

    reference.gather_blocks(case.storages, case.layout, ids, expected, null_block=NOWHERE)
    HostBlocks([case.layout], case.storages).gather(0, ids, memoryview(got))

    assert got.tobytes() == expected.tobytes()


@given(cases(), cases())
def test_each_group_has_its_own_blocks(one: Case, other: Case) -> None:
    moved = [replace(plane, storage=plane.storage + len(one.storages)) for plane in other.layout.planes]
    blocks = HostBlocks([one.layout, replace(other.layout, planes=tuple(moved))], one.storages + other.storages)
    for number, case in enumerate((one, other)):
        expected, got = (np.zeros(case.layout.chunk_bytes(len(case.block_ids)), np.uint8) for _ in range(2))

        reference.gather_blocks(case.storages, case.layout, case.block_ids, expected)
        blocks.gather(number, case.block_ids, memoryview(got))

        assert got.tobytes() == expected.tobytes()


@given(cases(), st.integers(0, 2**32 - 1))
def test_scatter_is_the_twins_and_touches_nothing_else(case: Case, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, case.layout.chunk_bytes(len(case.block_ids)), dtype=np.uint8)
    expected = case.copies()

    reference.scatter_blocks(expected, case.layout, case.block_ids, case.skip_blocks, data)
    HostBlocks([case.layout], case.storages).scatter(0, case.block_ids, case.skip_blocks, memoryview(data.tobytes()))

    assert all((a == b).all() for a, b in zip(expected, case.storages, strict=True))


@given(cases(), st.sampled_from([NOWHERE, BLOCKS, 1 << 40]))
def test_blocks_that_are_skipped_may_have_any_id(case: Case, anything: int) -> None:
    """They are the engine's by then, or nobody's; what lies behind them is written all the same."""
    data = np.random.default_rng(4).integers(0, 256, case.layout.chunk_bytes(len(case.block_ids)), dtype=np.uint8)
    ids, expected = case.block_ids.copy(), case.copies()
    reference.scatter_blocks(expected, case.layout, ids, case.skip_blocks, data)
    ids[: case.skip_blocks] = anything

    HostBlocks([case.layout], case.storages).scatter(0, ids, case.skip_blocks, memoryview(data.tobytes()))

    assert all((a == b).all() for a, b in zip(expected, case.storages, strict=True))


@given(cases())
def test_what_was_gathered_comes_back(case: Case) -> None:
    chunk = bytearray(case.layout.chunk_bytes(len(case.block_ids)))
    blocks = HostBlocks([case.layout], case.storages)
    blocks.gather(0, case.block_ids, memoryview(chunk))
    before = case.copies()
    for storage in case.storages:
        storage[:] = 0

    blocks.scatter(0, case.block_ids, 0, memoryview(chunk))

    again = bytearray(len(chunk))
    blocks.gather(0, case.block_ids, memoryview(again))
    assert again == chunk
    assert any(b.any() for b in before) == any(s.any() for s in case.storages) or not any(chunk)


@pytest.mark.behaviour("D005", "D006")
@given(cases(), st.sampled_from(["range", "negative", "twice", "size", "group"]))
def test_bad_ids_are_refused_before_a_byte_moves(case: Case, fault: str) -> None:
    ids, size, group = case.block_ids, case.layout.chunk_bytes(len(case.block_ids)), 0
    match fault:
        case "range":
            ids = np.append(ids[1:], BLOCKS)
        case "negative":
            ids = np.append(ids[1:], -2)
        case "twice":
            ids, size = np.append(ids, ids[0]), case.layout.chunk_bytes(len(ids) + 1)
        case "size":
            size += 1
        case "group":
            group = 1
    blocks, before = HostBlocks([case.layout], case.storages), case.copies()
    out = bytearray(size)

    with pytest.raises((IndexError, ValueError)):
        blocks.scatter(group, ids, 0, memoryview(b"\xff" * size))
    with pytest.raises((IndexError, ValueError)):
        blocks.gather(group, ids, memoryview(out))

    assert not any(out)
    assert all((a == b).all() for a, b in zip(before, case.storages, strict=True))
    if fault in ("range", "negative", "twice"):
        with pytest.raises((IndexError, ValueError)):
            reference.check_blocks(ids, BLOCKS)
