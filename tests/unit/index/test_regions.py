# SPDX-License-Identifier: Apache-2.0
import numpy as np

from kvpool.index.regions import Regions, SlotClass

SMALL, LARGE = SlotClass(4, "t"), SlotClass(8, "")


def regions(count: int = 3) -> Regions:
    return Regions(count, 8, 32, lambda _, slot_bytes, __: 32 // slot_bytes)


def test_opens_and_takes_lowest_positions_first() -> None:
    made = regions()
    made.open(1, SMALL)

    assert made.take(SMALL, 3).tolist() == [8, 9, 10]
    assert (made.slots, made.slots_used, made.used_bytes, made.cut_bytes) == (8, 3, 12, 32)
    assert made.owner == [None, "t", None]


def test_takes_over_region_borders_and_no_more_than_there_is() -> None:
    made = regions()
    made.open(0, SMALL)
    made.open(2, SMALL)

    taken = made.take(SMALL, 100)

    assert sorted(taken.tolist()) == [*range(8), *range(16, 24)]
    assert made.take(SMALL, 1).tolist() == []


def test_classes_do_not_mix() -> None:
    made = regions()
    made.open(0, SMALL)

    assert made.take(LARGE, 1).tolist() == []
    assert made.take(SlotClass(4, "other"), 1).tolist() == []


def test_given_slots_are_taken_again() -> None:
    made = regions()
    made.open(0, SMALL)
    made.open(1, SMALL)
    everything = made.take(SMALL, 16)

    made.give(everything[[3, 12]])

    assert sorted(made.take(SMALL, 16).tolist()) == sorted(everything[[3, 12]].tolist())
    assert made.slots_used == 16


def test_a_draining_region_gives_no_slots_and_becomes_empty_with_its_last() -> None:
    made = regions()
    region = made.open(0, SMALL)
    slots = made.take(SMALL, 2)

    made.drain(region, 5.0)
    assert made.take(SMALL, 1).tolist() == []
    made.give(slots[:1])
    assert made.take(SMALL, 1).tolist() == []
    made.give(slots[1:])

    assert sorted(made.empty) == [0, 1, 2]
    assert (made.slots, made.slots_used, made.used_bytes, made.cut_bytes) == (0, 0, 0, 0)
    assert list(made) == []
    assert made.owner[0] == "t"


def test_a_region_that_is_let_be_gives_slots_again() -> None:
    made = regions()
    region = made.open(0, SMALL)
    slots = made.take(SMALL, 8)
    made.drain(region, 5.0)
    made.give(slots[:1])

    made.undrain(region)
    made.give(slots[1:2])

    assert len(made.take(SMALL, 8)) == 2


def test_draining_an_unused_region_makes_it_empty_at_once() -> None:
    made = regions()
    region = made.open(0, SMALL)

    made.drain(region, 1.0)

    assert 0 in made.empty
    assert made.of(SMALL) == []


def test_an_adopted_region_keeps_its_held_slots() -> None:
    made = regions()

    made.adopt(1, SMALL, np.array([0, 7]))

    assert sorted(made.take(SMALL, 8).tolist()) == [9, 10, 11, 12, 13, 14]
    assert (made.slots, made.slots_used) == (8, 8)
    assert 1 not in made.empty


def test_a_full_adopted_region_opens_with_the_first_slot_that_comes_back() -> None:
    made = regions()
    made.adopt(0, LARGE, np.arange(4))

    made.give(np.array([2]))

    assert made.take(LARGE, 4).tolist() == [2]
