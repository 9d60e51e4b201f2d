# SPDX-License-Identifier: Apache-2.0
"""Runs of the mapped mode against the specification: whatever the layout, ids and part, the same bytes move."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.transfer import reference
from kvpool.transfer.mover.runs import Costs, host_copies, most_runs, runs_of
from kvpool.transfer.plan import NOWHERE, parts_of, slot_ids, turns_of
from kvpool.transfer.planes import Layout, Plane

BLOCKS = 24


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Planes with and without gaps between their blocks, side by side or one in another, over one or two storages."""
    planes, ends = [], [0, 0]
    for number in range(draw(st.integers(1, 4))):
        storage, size = draw(st.integers(0, 1)), draw(st.integers(1, 24))
        stride, gap = size + draw(st.sampled_from([0, 0, 3])), draw(st.sampled_from([0, 0, 5]))
        offset = ends[storage] + gap
        planes.append(
            Plane(name=str(number), storage=storage, offset=offset, stride=stride, block_bytes=size, packing="p")
        )
        ends[storage] = offset + BLOCKS * stride
    return Layout(planes=tuple(planes), blocks=BLOCKS, block_tokens=2)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Layout, np.ndarray, int]:
    """A layout, the ids of some chunks (in order, so that runs merge, or not; some NOWHERE), and a slot's size."""
    layout = draw(layouts())
    whole = draw(st.integers(1, 5))
    chunks = draw(st.integers(1, BLOCKS // whole))
    order = list(range(BLOCKS)) if draw(st.booleans()) else draw(st.permutations(range(BLOCKS)))
    ids = np.array(order[: chunks * whole], dtype=np.int64)
    ids[draw(st.lists(st.integers(0, len(ids) - 1), max_size=3))] = NOWHERE
    least = max(p.block_bytes for p in layout.planes)
    slot = draw(st.integers(least, 3 * layout.chunk_bytes(whole) + least))
    return layout, slot_ids(ids.reshape(chunks, whole), BLOCKS, null_block=NOWHERE), slot


def storages_of(layout: Layout) -> list[np.ndarray]:
    ends = [1, 1]
    for plane in layout.planes:
        ends[plane.storage] = max(ends[plane.storage], plane.offset + layout.blocks * plane.stride)
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, end, dtype=np.uint8) for end in ends]


class Memory:
    """Both storages in one space of addresses."""

    ADDRESSES = (1000, 900_000)

    def __init__(self, layout: Layout) -> None:
        self.storages = storages_of(layout)

    def at(self, address: int, length: int) -> np.ndarray:
        which = int(address >= self.ADDRESSES[1])
        start = address - self.ADDRESSES[which]
        assert start >= 0
        assert start + length <= len(self.storages[which]), "a run leaves its storage"
        return self.storages[which][start : start + length]


@given(jobs())
def test_runs_move_what_the_specification_moves(job: tuple[Layout, np.ndarray, int]) -> None:
    layout, ids, slot_bytes = job
    memory, whole = Memory(layout), ids.shape[1]
    size = layout.chunk_bytes(whole)
    parts = parts_of(layout, whole, slot_bytes)
    stored = np.zeros((len(ids), size), dtype=np.uint8)
    brought = np.random.default_rng(2).integers(0, 256, (len(ids), size), dtype=np.uint8)
    wanted = [s.copy() for s in memory.storages]
    gathered = np.zeros_like(stored)
    for chunk, blocks in enumerate(ids):
        reference.gather_blocks(wanted, layout, blocks, gathered[chunk], NOWHERE)

    for turn in turns_of(range(len(ids)), parts, slot_bytes):
        for cache, host, length in copies(layout, ids, turn, size):
            stored.reshape(-1)[host : host + length] = memory.at(cache, length)
    assert (stored == gathered).all()

    for chunk, blocks in enumerate(ids):
        reference.scatter_blocks(wanted, layout, blocks, 0, brought[chunk], NOWHERE)
    for turn in turns_of(range(len(ids)), parts, slot_bytes):
        for cache, host, length in copies(layout, ids, turn, size):
            memory.at(cache, length)[:] = brought.reshape(-1)[host : host + length]
    for got, expected in zip(memory.storages, wanted, strict=True):
        assert (got == expected).all()


def copies(layout, ids, turn, size):
    """The copies of a turn whose chunks lie one after the other from address 0."""
    part = turn.part
    runs = runs_of(layout, Memory.ADDRESSES, ids[list(turn.chunks)], part)
    # Planes of the same storage may follow each other, too.
    counted = most_runs(layout, ids[list(turn.chunks)], part)
    assert counted - len(turn.chunks) * (part.end_plane - part.first_plane - 1) <= len(runs) <= counted
    places = [(n * part.length, chunk * size + part.offset, part.length) for n, chunk in enumerate(turn.chunks)]
    return host_copies(runs, places)


def test_blocks_that_follow_each_other_are_one_run_for_each_plane_and_chunk() -> None:
    planes = tuple(
        Plane(name=str(n), storage=0, offset=n * 4096, stride=64, block_bytes=64, packing="p") for n in range(3)
    )
    layout = Layout(planes=planes, blocks=64, block_tokens=16)
    (part,) = parts_of(layout, 4, 4096)

    runs = runs_of(layout, [0], np.arange(8).reshape(2, 4), part)

    assert runs.length.tolist() == [256] * 6
    assert most_runs(layout, np.arange(8).reshape(2, 4), part) == 6
    assert runs.cache.tolist() == [0, 4096, 8192, 256, 4352, 8448]
    assert len(runs_of(layout, [0], np.arange(0, 16, 2).reshape(2, 4), part)) == 24


COSTS = Costs(copy_s=2e-6, launch_s=20e-6, byte_s=1e-12)


def test_few_long_runs_are_copied_and_many_short_ones_gathered() -> None:
    assert COSTS.by_copies(runs=8, length=32 << 20, places=1)
    assert not COSTS.by_copies(runs=4096, length=32 << 20, places=1)


@given(st.integers(1, 10_000), st.integers(1, 1 << 26), st.integers(1, 64))
def test_more_bytes_or_fewer_runs_never_turn_copies_down(runs: int, length: int, places: int) -> None:
    if COSTS.by_copies(runs, length, places):
        assert COSTS.by_copies(runs - 1, length, places)
        assert COSTS.by_copies(runs, 2 * length, places)
        assert COSTS.by_copies(runs, length, places + 1)
