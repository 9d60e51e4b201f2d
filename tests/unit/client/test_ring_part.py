# SPDX-License-Identifier: Apache-2.0
"""A job's part in the ring: what was prepared is used if it is what the server wants, and given up if not."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvpool.client.jobs import LoadJob
from kvpool.client.ring_part import RingPart
from kvpool.client.ring_ports import RingWork


@dataclass(eq=False)
class Move:
    chunks: Sequence[int]
    idle: bool = True
    cancelled: bool = False

    def cancel(self, timeout_s: float) -> bool:
        del timeout_s
        self.cancelled = True
        return self.idle


@dataclass(eq=False)
class Ring:
    made: list[Move] = field(default_factory=list)
    gathered: list[Move] = field(default_factory=list)
    forgotten: list[Move] = field(default_factory=list)
    wrong: bool = False

    def move(self, work: RingWork) -> Move:
        if self.wrong:
            raise IndexError("block 99 of 64")
        self.made.append(Move(work.chunks))
        return self.made[-1]

    def gather(self, move: Move) -> None:
        self.gathered.append(move)

    def forget(self, move: Move) -> None:
        self.forgotten.append(move)


class Rings:
    def __init__(self) -> None:
        self.ring: Ring | None = Ring()

    def current(self) -> Ring | None:
        return self.ring


def job() -> LoadJob:
    ids = np.zeros((8, 1), dtype=np.int64)
    return LoadJob(request_id="l", lookup_id=b"", group=0, shard=0, first=0, end=8, block_ids=ids)


@pytest.fixture
def rings() -> Rings:
    return Rings()


@pytest.fixture
def part(rings: Rings) -> RingPart:
    return RingPart(rings, job(), lambda: None)  # type: ignore[arg-type]


def test_what_was_prepared_is_taken(rings: Rings, part: RingPart) -> None:
    assert part.is_new()
    part.prepare(range(3), gather=True)
    assert (part.is_new(), part.move) == (False, None), "nothing is moved before it is taken"

    taken = part.take([0, 1, 2])

    ring = rings.ring
    assert ring is not None
    assert taken == (ring, ring.made[0])
    assert part.move is ring.made[0]
    part.drop(1.0)
    assert (len(ring.made), ring.gathered, ring.forgotten) == (1, ring.made, []), "what was taken is not given up"


def test_what_is_not_wanted_is_given_up_and_nothing_is_gathered_for_loads(rings: Rings, part: RingPart) -> None:
    part.prepare(range(3), gather=False)

    taken = part.take([0, 2])

    ring = rings.ring
    assert ring is not None
    assert taken == (ring, ring.made[1])
    assert [[*move.chunks] for move in ring.made] == [[0, 1, 2], [0, 2]]
    assert (ring.gathered, ring.forgotten) == ([], ring.made[:1])
    part.drop(1.0)
    assert len(ring.forgotten) == 1, "once"


def test_another_ring_takes_over_what_one_had_prepared(rings: Rings, part: RingPart) -> None:
    part.prepare(range(3), gather=True)
    former, rings.ring = rings.ring, Ring()

    taken = part.take([0, 1, 2])

    assert taken == (rings.ring, rings.ring.made[0])
    assert former is not None
    assert former.forgotten == former.made


def test_without_a_ring_there_is_nothing_to_take(rings: Rings, part: RingPart) -> None:
    rings.ring = None
    part.prepare(range(3), gather=True)
    assert part.take([0, 1, 2]) is None
    assert not RingPart(None, job(), lambda: None).is_new()


def test_ids_that_are_wrong_are_told_when_it_is_taken(rings: Rings, part: RingPart) -> None:
    assert rings.ring is not None
    rings.ring.wrong = True
    part.prepare(range(3), gather=True)
    assert not part.is_new()
    with pytest.raises(IndexError):
        part.take([0, 1, 2])


@pytest.mark.parametrize("idle", [(True, True), (True, False), (False, True)])
def test_all_its_moves_are_cancelled_and_none_is_made_later(
    rings: Rings, part: RingPart, idle: tuple[bool, bool]
) -> None:
    part.prepare(range(3), gather=True)
    part.take([1])
    assert rings.ring is not None
    for move, is_idle in zip(rings.ring.made, idle, strict=True):
        move.idle = is_idle

    assert part.cancel(0.0) is all(idle)

    assert all(move.cancelled for move in rings.ring.made)
    assert part.take([1]) is None
    part.prepare(range(3), gather=True)
    assert len(rings.ring.made) == 2


def test_nothing_is_prepared_for_what_was_dropped(rings: Rings, part: RingPart) -> None:
    part.drop(1.0)
    part.prepare(range(3), gather=True)
    assert rings.ring is not None
    assert (rings.ring.made, part.take([0])) == ([], None)
