# SPDX-License-Identifier: Apache-2.0
"""Of which stored chunks a mover is asked for a checksum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.metrics.numbers import Numbers
from kvpool.model.checksum import PREFERRED
from kvpool.model.slots import CHECK, PLACEMENT, Disposition
from kvpool.server.granted import Granted, sampled
from kvpool.transfer.mover.messages import Direction


class Movers:
    """Notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def grant(self, mover_id: bytes, name: bytes, way: Direction, rows: np.ndarray, checks: bytes) -> bool:
        assert (mover_id, way, len(name)) == (b"m", Direction.STORE, 8)
        assert not checks or len(checks) == len(rows) * CHECK.itemsize
        self.asked.append(checks)
        return True


class Claims:
    def hold(self, slots: np.ndarray) -> None:
        assert not len(slots)


def kinds(share: float, stores: list[list[int]]) -> list[list[int]]:
    """Kinds that were asked for; each store is a list of dispositions."""
    movers = Movers()
    granted = Granted(movers, Claims(), Numbers(), share)  # type: ignore[arg-type]
    for number, dispositions in enumerate(stores):
        rows = np.zeros(len(dispositions), dtype=PLACEMENT)
        rows["disposition"] = dispositions
        granted.grant(b"m", Direction.STORE, (b"c", number.to_bytes(2)), rows, 0.0)
    return [np.frombuffer(checks, dtype=CHECK)["kind"].tolist() for checks in movers.asked]


WRITE, PRESENT = int(Disposition.WRITE), int(Disposition.PRESENT)


def test_a_share_is_kept_also_over_several_stores() -> None:
    found = kinds(0.25, [[WRITE] * 3, [WRITE] * 3, [WRITE] * 19])

    assert found == [[], [PREFERRED, 0, 0], [*(PREFERRED * n for n in (1, 0, 1, 1, 1, 0, 1)), *[0] * 12]]


def test_what_is_not_written_has_none_and_does_not_count() -> None:
    assert kinds(0.5, [[PRESENT, WRITE, PRESENT, WRITE, WRITE]]) == [[0, PREFERRED, 0, 0, 0]]


def test_the_end_of_a_store_waits_for_no_checksum() -> None:
    sizes = np.random.default_rng(2).integers(1, 40, 250).tolist()
    found = kinds(0.05, [[WRITE] * n for size in sizes for n in (size, 16)])[1::2]

    seen = np.flatnonzero(np.any([row for row in found if row], axis=0)).tolist()
    assert seen == list(range(4)), "every place before the last twelve has its turn"


@given(st.integers(1, 40), st.data())
def test_so_many_chunks_as_are_wanted_are_sampled(chunks: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, chunks))
    within = data.draw(st.floats(1e-3, 1) | st.just(1.0))

    found = sampled(chunks, count, within).tolist()

    assert len(set(found)) == len(found) == count
    assert all(0 <= place < max(chunks - 12, count, 1) for place in found)


def test_all_or_none() -> None:
    assert kinds(1.0, [[WRITE, PRESENT, WRITE]]) == [[PREFERRED, 0, PREFERRED]]
    assert kinds(0.0, [[WRITE, WRITE]]) == [[]]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.999])
def test_the_share_is_kept_over_many_stores_of_any_size(share: float) -> None:
    sizes = np.random.default_rng(1).integers(1, 40, 250).tolist()

    found = sum(sum(k > 0 for k in row) for row in kinds(share, [[WRITE] * n for n in sizes]))

    assert abs(found - share * sum(sizes)) <= 1
