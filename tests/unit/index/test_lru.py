# SPDX-License-Identifier: Apache-2.0
import numpy as np

from kvpool.index.policy.lru import Lru


def order(policy: Lru, slots: list[int]) -> list[int]:
    return np.array(slots)[np.argsort(policy.rank(np.array(slots)))].tolist()


def ordinals(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def test_the_least_recently_used_goes_first_and_the_leaf_first_within_one_use() -> None:
    policy = Lru(16)
    policy.stored(np.array([0, 1, 2]), ordinals(0, 1, 2), -1)
    policy.stored(np.array([3, 4]), ordinals(0, 1), -1)
    policy.used(np.array([0, 1]), ordinals(0, 1))

    assert order(policy, [0, 1, 2, 3, 4]) == [2, 4, 3, 1, 0]


def test_a_chunk_never_outlives_its_parent() -> None:
    policy = Lru(16)
    policy.stored(np.array([0, 1]), ordinals(0, 1), -1)
    policy.stored(np.array([5]), ordinals(0), -1)

    policy.stored(np.array([2, 3]), ordinals(2, 3), 1)

    assert order(policy, [0, 1, 2, 3, 5]) == [3, 2, 1, 0, 5]


def test_very_long_chains_stay_in_their_turn() -> None:
    policy = Lru(4)
    policy.stored(np.array([0]), ordinals(1 << 31), -1)
    policy.stored(np.array([1]), ordinals(1 << 31), -1)

    assert order(policy, [0, 1]) == [0, 1]
