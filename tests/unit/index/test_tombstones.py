# SPDX-License-Identifier: Apache-2.0
from kvpool.index.tombstones import Tombstones


def test_an_end_is_remembered_once_and_for_a_time() -> None:
    tombs = Tombstones(10, 100)
    tombs.leave("a", 0)
    tombs.leave("b", 0)

    assert tombs.take("a", 5)
    assert not tombs.take("a", 5)
    assert not tombs.take("b", 10)


def test_expiry_forgets_the_old_ones_alone() -> None:
    tombs = Tombstones(10, 100)
    tombs.leave("a", 0)
    tombs.leave("b", 5)
    tombs.leave("a", 6)
    assert tombs.next_s() == 15

    tombs.expire(15)

    assert len(tombs) == 1
    assert tombs.take("a", 15)


def test_a_flood_of_ends_takes_bounded_memory() -> None:
    tombs = Tombstones(10, 100)

    for key in range(1000):
        tombs.leave(key, 0)

    assert len(tombs) == 100
    assert tombs.take(999, 1)
    assert not tombs.take(0, 1)
