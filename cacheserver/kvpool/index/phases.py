# SPDX-License-Identifier: Apache-2.0
"""The states of a slot and the only moves between them.

    FREE --RESERVE--> WRITING --COMMIT--> READY --CONDEMN--> CONDEMNED --FREE--> FREE
                         |                                       ^
                         +--ABORT--------------------------------+
                         +--CONDEMN--> LAPSED --ABORT------------+

A slot has holders: its writer, and the pins of its readers (a running copy out of it is a pin like any other). Only a
slot without holders becomes FREE, so nothing can hand out memory that somebody may still write to or read from.
"""

from enum import IntEnum
from typing import Final

import numpy as np

__all__ = ["CONDEMNED", "ILLEGAL", "LAPSED", "MOVES", "NEXT", "READY", "WRITING", "IllegalMove", "Op", "Phase"]


class IllegalMove(Exception):
    """A move that the table does not have: always our bug, never a client's. Nothing was changed."""


class Phase(IntEnum):
    """Where a slot stands. FREE is 0, so that a fresh array of zeros is a table of free slots."""

    FREE = 0
    WRITING = 1
    """Taken, in the index, its bytes not there yet; its writer holds it."""
    READY = 2
    """Readable; held by its readers' pins."""
    CONDEMNED = 3
    """Out of the index; nobody writes any more; free once the last pin goes."""
    LAPSED = 4
    """Out of the index, and its writer may still write; only the proof that it does not moves it on."""


# NumPy asks an enum's class for a dozen protocols at each comparison, 20 microseconds of it in one lookup; these it
# takes as they are.
WRITING: Final = int(Phase.WRITING)
READY: Final = int(Phase.READY)
CONDEMNED: Final = int(Phase.CONDEMNED)
LAPSED: Final = int(Phase.LAPSED)


class Op(IntEnum):
    """What can happen to a slot."""

    RESERVE = 0
    ADOPT = 1
    """Take over a complete slot of a former server."""
    SEIZE = 2
    """Take over a slot that a former server's client may still write to."""
    COMMIT = 3
    ABORT = 4
    """The writer is proven to write no more, and its bytes are not wanted."""
    CONDEMN = 5
    PIN = 6
    UNPIN = 7
    FREE = 8


MOVES: Final = {
    (Phase.FREE, Op.RESERVE): Phase.WRITING,
    (Phase.FREE, Op.ADOPT): Phase.READY,
    (Phase.FREE, Op.SEIZE): Phase.LAPSED,
    (Phase.WRITING, Op.COMMIT): Phase.READY,
    (Phase.WRITING, Op.ABORT): Phase.CONDEMNED,
    (Phase.WRITING, Op.CONDEMN): Phase.LAPSED,
    (Phase.LAPSED, Op.ABORT): Phase.CONDEMNED,
    (Phase.READY, Op.CONDEMN): Phase.CONDEMNED,
    (Phase.READY, Op.PIN): Phase.READY,
    (Phase.READY, Op.UNPIN): Phase.READY,
    (Phase.CONDEMNED, Op.UNPIN): Phase.CONDEMNED,
    (Phase.CONDEMNED, Op.FREE): Phase.FREE,
}
"""The transition table; FREE additionally needs that no pin is left, UNPIN that there are as many as it takes."""

ILLEGAL: Final = 255

NEXT: Final = tuple(np.array([MOVES.get((p, op), ILLEGAL) for p in Phase], dtype=np.uint8) for op in Op)
"""The same table as arrays, ``NEXT[op][phase]``, so that one gather moves a whole batch."""
