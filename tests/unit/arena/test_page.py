# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.arena.header import Store
from kvpool.arena.page import Cut, Page, cutting, identity_page
from kvpool.arena.sizes import Sizes

SIZES = Sizes(regions=4, region_bytes=4 << 20)
OLD = Cut(slot_bytes=1 << 20, slots=4, owner="team-a")
NEW = Cut(slot_bytes=65536, slots=64, owner="другая команда")


def fresh() -> np.ndarray:
    return np.frombuffer(bytearray(identity_page("pool", 2, SIZES)), dtype=np.uint8)


def test_a_fresh_page_is_empty_and_unused() -> None:
    page = Page(fresh())

    assert page.cut() is None
    assert not page.used


@pytest.mark.parametrize("cut", [OLD, NEW, Cut(4096, 1, ""), Cut(4096, 1, "x" * 1024)])
def test_a_cut_comes_back(cut: Cut) -> None:
    page = Page(fresh())
    page.write(cut)

    assert page.cut() == cut
    assert page.used
    page.erase()
    assert page.cut() is None


def test_a_page_is_of_one_pool_region_and_size() -> None:
    page = Page(fresh())

    assert page.is_of("pool", 2, SIZES)
    assert not page.is_of("pool2", 2, SIZES)
    assert not page.is_of("pool", 3, SIZES)
    assert not page.is_of("pool", 2, Sizes(regions=4, region_bytes=8 << 20))
    assert page.is_of("pool", 2, Sizes(regions=9, region_bytes=4 << 20)), (
        "more regions of the same size are the same layout"
    )


@given(st.booleans(), st.data())
def test_a_crash_within_any_store_leaves_the_old_cut_the_new_one_or_none(had_one: bool, data: st.DataObject) -> None:
    raw = fresh()
    if had_one:
        Page(raw).write(OLD)
    words = raw[512 : 512 + 1064].view(np.uint64)
    steps: list[Store] = cutting(NEW)
    last = data.draw(st.integers(0, len(steps) - 1))
    for i, step in enumerate(steps[: last + 1]):
        values = step.values.ravel()
        keep = np.array([i < last or data.draw(st.booleans()) for _ in values])
        target = words[step.first : step.first + len(values)]
        target[keep] = values[keep]

    assert Page(raw).cut() in (OLD if had_one else None, NEW, None)


def test_a_damaged_cut_is_none_but_its_region_was_used() -> None:
    raw = fresh()
    Page(raw).write(OLD)
    raw[512 + 16] ^= 1

    assert Page(raw).cut() is None
    assert Page(raw).used
