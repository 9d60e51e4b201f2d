# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from kvpool.index.phases import MOVES, IllegalMove, Op, Phase
from kvpool.index.slots import SlotTable

ONE = np.array([3])


def table_in(phase: Phase, pins: int = 0) -> SlotTable:
    table = SlotTable(8)
    table.phase[3] = phase
    table.pins[3] = pins
    return table


def move(table: SlotTable, op: Op) -> None:
    match op:
        case Op.RESERVE | Op.ADOPT | Op.SEIZE:
            table.take(op, ONE, 1, [b"key"])
        case Op.COMMIT:
            table.commit(ONE)
        case Op.ABORT:
            table.abort(ONE)
        case Op.CONDEMN:
            table.condemn(ONE)
        case Op.PIN:
            table.pin(ONE, 1)
        case Op.UNPIN:
            table.unpin(ONE, 1)
        case Op.FREE:
            table.free(ONE)


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("phase", Phase)
def test_every_move_is_legal_or_changes_nothing(phase: Phase, op: Op) -> None:
    table = table_in(phase, pins=int(op is Op.UNPIN))

    if (phase, op) in MOVES:
        move(table, op)
        assert table.phase[3] == MOVES[phase, op]
    else:
        with pytest.raises(IllegalMove, match=f"{op.name} on slot 3 in {phase.name}"):
            move(table, op)
        assert (table.phase[3], table.illegal_moves) == (phase, 1)


def test_a_batch_with_one_illegal_slot_changes_none() -> None:
    table = table_in(Phase.READY)

    with pytest.raises(IllegalMove):
        table.pin(np.array([3, 4]), 1)

    assert table.pins.tolist() == [0] * 8


def test_more_pins_cannot_be_taken_than_are_there() -> None:
    table = table_in(Phase.READY, pins=1)

    with pytest.raises(IllegalMove):
        table.unpin(ONE, 2)

    assert table.pins[3] == 1


def test_a_pinned_slot_is_not_freed() -> None:
    table = table_in(Phase.CONDEMNED, pins=1)

    with pytest.raises(IllegalMove):
        table.free(ONE)

    assert table.phase[3] == Phase.CONDEMNED


def test_pin_says_how_many_had_none_and_unpin_which_have_none_left() -> None:
    table = table_in(Phase.READY, pins=1)
    table.phase[4] = Phase.READY
    slots = np.array([3, 4])

    assert table.pin(slots, 2) == 1
    assert table.unpin(slots, np.array([1, 2], dtype=np.int32)).tolist() == [False, True]


def test_a_taken_slot_has_its_key_and_table() -> None:
    table = SlotTable(8)

    table.take(Op.RESERVE, np.array([1, 5]), 9, [b"one", b"five"])

    assert table.key.tolist() == [None, b"one", None, None, None, b"five", None, None]
    assert table.table[[1, 5]].tolist() == [9, 9]


def test_only_adopted_slots_are_unverified() -> None:
    table = SlotTable(8)
    for op, slot in ((Op.ADOPT, 1), (Op.RESERVE, 2)):
        table.take(op, np.array([slot]), 1, [b"key"])

    assert table.unverified[[1, 2]].tolist() == [True, False]
