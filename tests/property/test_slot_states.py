# SPDX-License-Identifier: Apache-2.0
"""The slot table against one slot kept as a plain value, for any sequence of moves."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.index.phases import IllegalMove, Op, Phase
from kvpool.index.slots import SlotTable


@dataclass(frozen=True)
class Entry:
    """A slot as its holders know it."""

    phase: Phase = Phase.FREE
    writer: bool = False
    readers: int = 0


def step(e: Entry, op: Op) -> Entry | None:  # noqa: C901, PLR0911 - a table, told in words
    """What the move does, told from its meaning; None where it makes no sense."""
    match e.phase, op:
        case Phase.FREE, Op.RESERVE:
            return Entry(Phase.WRITING, writer=True)
        case Phase.FREE, Op.ADOPT:
            return Entry(Phase.READY)
        case Phase.FREE, Op.SEIZE:
            return Entry(Phase.LAPSED, writer=True)
        case Phase.WRITING, Op.COMMIT:
            return Entry(Phase.READY)
        case ((Phase.WRITING | Phase.LAPSED), Op.ABORT):
            return Entry(Phase.CONDEMNED)
        case Phase.WRITING, Op.CONDEMN:
            return replace(e, phase=Phase.LAPSED)
        case Phase.READY, Op.CONDEMN:
            return replace(e, phase=Phase.CONDEMNED)
        case Phase.READY, Op.PIN:
            return replace(e, readers=e.readers + 1)
        case ((Phase.READY | Phase.CONDEMNED), Op.UNPIN) if e.readers:
            return replace(e, readers=e.readers - 1)
        case Phase.CONDEMNED, Op.FREE if not e.readers:
            return Entry()
    return None


def apply(table: SlotTable, op: Op, slot: int) -> None:
    at = np.array([slot])
    moves = {
        Op.COMMIT: table.commit,
        Op.ABORT: table.abort,
        Op.CONDEMN: table.condemn,
        Op.FREE: table.free,
        Op.PIN: lambda s: table.pin(s, 1),
        Op.UNPIN: lambda s: table.unpin(s, 1),
    }
    if op in moves:
        moves[op](at)
    else:
        table.take(op, at, 1, [b"key"])


@given(st.lists(st.tuples(st.sampled_from(Op), st.integers(0, 2)), max_size=60))
def test_the_table_agrees_with_the_meaning_of_each_move(moves: list[tuple[Op, int]]) -> None:
    table, entries = SlotTable(3), [Entry()] * 3
    for op, slot in moves:
        after = step(entries[slot], op)
        try:
            apply(table, op, slot)
        except IllegalMove:
            assert after is None
        else:
            assert after is not None
            entries[slot] = after
        assert table.phase.tolist() == [e.phase for e in entries]
        assert table.pins.tolist() == [e.readers for e in entries]


@given(st.lists(st.sampled_from(Op), max_size=60))
def test_a_slot_is_never_taken_anew_while_anybody_holds_it(ops: list[Op]) -> None:
    table, writing, pins = SlotTable(1), False, 0
    for op in ops:
        try:
            apply(table, op, 0)
        except IllegalMove:
            continue
        if op in (Op.RESERVE, Op.SEIZE, Op.ADOPT):
            assert not writing
            assert not pins
            writing = op is not Op.ADOPT
        writing = writing and op not in (Op.COMMIT, Op.ABORT)
        pins += (op is Op.PIN) - (op is Op.UNPIN)
        assert pins >= 0
