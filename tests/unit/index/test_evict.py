# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
