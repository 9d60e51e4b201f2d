# SPDX-License-Identifier: Apache-2.0
"""How long a prefix is that every group and shard can restore.

A group needs the last ``reach`` chunks of a prefix (all of them, if the prefix is no longer than that): full attention
reaches over everything, a sliding window over its window, a recurrent state over the last chunk alone.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["longest", "needed", "pin_costs", "restorable"]


def restorable(available: Sequence[NDArray[np.bool_]], reaches: Sequence[int]) -> NDArray[np.bool_]:
    """Return for each length from 0 to n whether a prefix of so many chunks can be restored.

    Args:
        available: for each table, which of the n chunks it has.
        reaches: for each table, its group's reach; at least 1.
    """
    count = len(available[0])
    ok = np.ones(count + 1, dtype=np.bool_)
    row = np.arange(count)
    for have, reach in zip(available, reaches, strict=True):
        if have.all():
            continue
        last_gap = np.maximum.accumulate(np.where(have, -1, row))
        ok[1:] &= (row - last_gap) >= np.minimum(row + 1, reach)
    return ok


def longest(ok: NDArray[np.bool_]) -> int:
    """Return the greatest length that is ok; length 0 always is."""
    return len(ok) - 1 - int(np.argmax(ok[::-1]))


def needed(chunks: int, reach: int) -> slice:
    """Return the rows of one table that a prefix of *chunks* needs."""
    return slice(max(0, chunks - reach), chunks)


def pin_costs(new_bytes: Sequence[NDArray[np.int64]], reaches: Sequence[int]) -> NDArray[np.int64]:
    """Return for each length from 0 to n how many bytes pinning that prefix adds.

    Args:
        new_bytes: for each table, what pinning each of the n chunks would add.
        reaches: for each table, its group's reach.
    """
    lengths = np.arange(len(new_bytes[0]) + 1)
    total = np.zeros(len(lengths), dtype=np.int64)
    for new, reach in zip(new_bytes, reaches, strict=True):
        before = np.concatenate(([0], np.cumsum(new)))
        total += before[lengths] - before[np.maximum(0, lengths - reach)]
    return total
