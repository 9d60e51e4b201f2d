# SPDX-License-Identifier: Apache-2.0
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.index import evict
from kvpool.index.evict import Evictor, _lowest
from kvpool.index.phases import Phase
from kvpool.index.policy.lru import Lru
from kvpool.index.regions import Regions, SlotClass
from kvpool.index.slots import SlotTable

CLS = SlotClass(1, "t")


@given(st.lists(st.integers(0, 50), min_size=2, max_size=200), st.data())
def test_what_is_left_out_is_never_lower(values: list[int], data: st.DataObject) -> None:
    about = data.draw(st.integers(1, len(values) - 1))
    least = data.draw(st.integers(1, about))
    ranks = np.array(values, dtype=np.int64)

    found = _lowest(ranks, about, least)

    left = np.delete(ranks, found)
    assert len(found) == len(set(found.tolist())) >= least
    assert not len(left) or ranks[found].max() <= left.min()


@pytest.fixture
def many() -> tuple[SlotTable, Lru, Evictor]:
    """10,000 readable slots, one use each, in the order of their numbers."""
    regions = Regions(1, 10_000, 10_000, lambda *_: 10_000)
    regions.open(0, CLS)
    regions.take(CLS, 10_000)
    slots, policy = SlotTable(10_000), Lru(10_000)
    slots.phase[:] = Phase.READY
    for slot in range(10_000):
        policy.used(np.array([slot]), np.zeros(1, dtype=np.uint32))
    return slots, policy, Evictor(slots, regions, policy)


def test_victims_come_in_order_from_one_search(many: tuple[SlotTable, Lru, Evictor]) -> None:
    _, _, evictor = many

    first, second = evictor.victims(CLS, 100), evictor.victims(CLS, 100)

    assert (first.slots.tolist(), first.fresh) == (list(range(100)), True)
    assert (second.slots.tolist(), second.fresh) == (list(range(100, 200)), False)


def test_what_was_used_or_pinned_since_the_search_is_no_victim(many: tuple[SlotTable, Lru, Evictor]) -> None:
    slots, policy, evictor = many
    evictor.victims(CLS, 10)
    policy.used(np.array([11]), np.zeros(1, dtype=np.uint32))
    slots.pin(np.array([12]), 1)
    slots.condemn(np.array([13]))

    assert evictor.victims(CLS, 5).slots.tolist() == [10, 14]


def test_forgotten_victims_are_looked_for_anew(many: tuple[SlotTable, Lru, Evictor]) -> None:
    _, _, evictor = many
    evictor.victims(CLS, 10)

    evictor.forget(CLS)

    assert evictor.victims(CLS, 2).slots.tolist() == [0, 1]


@pytest.mark.parametrize("few", [0, evict._FEW])
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_all_regions_of_a_class_are_searched(few: int, counts: list[int], chance: Random) -> None:
    stride = 16
    regions = Regions(len(counts) + 1, stride, stride, lambda number, *_: counts[number])
    slots, policy = SlotTable((len(counts) + 1) * stride), Lru((len(counts) + 1) * stride)
    for number in chance.sample(range(len(counts)), len(counts)):
        regions.open(number, CLS)
    drained = regions.of(CLS)[0] if len(counts) > 1 else None
    if drained is not None:
        regions.take(CLS, sum(counts))
        regions.drain(drained, 0.0)
    there = [n * stride + i for n, count in enumerate(counts) for i in range(count)]
    slots.phase[there] = [chance.choice(list(Phase)) for _ in there]
    slots.pins[there] = [chance.randrange(2) for _ in there]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evict, "_FEW", few)
        found = Evictor(slots, regions, policy).victims(CLS, len(there)).slots.tolist()

    wanted = [s for s in there if slots.phase[s] == Phase.READY and not slots.pins[s]]
    assert sorted(found) == [s for s in wanted if drained is None or s // stride != drained.number]
