# SPDX-License-Identifier: Apache-2.0
"""Slot headers: 192 bytes a slot, in a file beside the bytes that clients never map.

    word 0        the mark: sequence << 8 | state; zero means empty, whatever the rest holds
    word 1        the check: of all words, itself taken as zero
    words 2..23   the row (``HEADER_ROW``), then zeros

A header changes in three stores, in this order:

    1. mark := 0          the slot is empty
    2. words 1..23        nobody reads them while the mark is zero
    3. mark := new        the slot is what it shall be

A mark is one aligned word, so a store to it happens or does not. A process killed anywhere between or within these
stores therefore leaves the header as it was, as it shall be, or empty; and if anything else ever damages a header, its
check fails and the slot is taken for one that somebody may still write to. The kernel keeps the pages of a killed
process, and a processor retires stores in order, so no fence or flush is needed; an arena does not outlive the machine.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.arena.mixing import check_of
from kvpool.model.slots import HEADER_ROW, SlotArray, header_rows

__all__ = [
    "CHECK",
    "HEADER_BYTES",
    "HEADER_WORDS",
    "MARK",
    "ROW_WORD",
    "Pick",
    "Scan",
    "SlotState",
    "Store",
    "Words",
    "apply",
    "erasing",
    "read_rows",
    "rewriting",
    "scan",
]

Words = NDArray[np.uint64]
Pick = NDArray[np.int64] | slice
"""Some of several headers."""

HEADER_BYTES: Final = 192
HEADER_WORDS: Final = HEADER_BYTES // 8
MARK: Final = 0
CHECK: Final = 1
ROW_WORD: Final = 2
_ROW_BYTES: Final = HEADER_BYTES - ROW_WORD * 8
_STATE_BITS: Final = np.uint64(8)
_STATE_MASK: Final = np.uint64(0xFF)


class SlotState(IntEnum):
    """State in a mark; zero is an empty slot."""

    EMPTY = 0
    WRITING = 1
    READY = 2


@dataclass(frozen=True, slots=True)
class Store:
    """One step of a change, for many headers at once: the words from *first* on become *values*."""

    first: int
    values: Words
    """Shape (headers,) for one word each, else (headers, words)."""

    def taken(self, pick: Pick) -> "Store":
        """Return the same step for some of the headers."""
        return Store(self.first, self.values[pick])


@dataclass(frozen=True, slots=True)
class Scan:
    """What a table of headers says; positions count from the table's start."""

    ready: SlotArray
    """Complete slots whose check holds, oldest first."""
    ready_rows: NDArray[np.void]
    writing: SlotArray
    """All other slots that are not empty."""
    writing_rows: NDArray[np.void]
    """Their rows; zero where the check fails."""
    sequence: int
    """Highest sequence of a header whose check holds; 0 if there is none."""


def rewriting(rows: NDArray[np.void], state: SlotState, sequence: int) -> list[Store]:
    """Return the steps that turn headers into (*state*, *rows*), the first with *sequence*, each next with one more."""
    count = len(rows)
    words = np.zeros((count, HEADER_WORDS), dtype=np.uint64)
    raw = np.ascontiguousarray(rows, dtype=HEADER_ROW).view(np.uint8).reshape(count, HEADER_ROW.itemsize)
    words.view(np.uint8)[:, ROW_WORD * 8 : ROW_WORD * 8 + HEADER_ROW.itemsize] = raw
    words[:, MARK] = (np.arange(sequence, sequence + count, dtype=np.uint64) << _STATE_BITS) | np.uint64(state)
    words[:, CHECK] = check_of(words)
    return [*erasing(count), Store(CHECK, words[:, CHECK:]), Store(MARK, words[:, MARK])]


def erasing(count: int) -> list[Store]:
    """Return the one step that makes headers empty."""
    return [Store(MARK, np.zeros(count, dtype=np.uint64))]


def apply(table: Words, positions: SlotArray, steps: list[Store]) -> None:
    """Carry out *steps* on the headers at *positions* of *table*, shape (slots, HEADER_WORDS).

    A single word is stored through a column of its own: an aligned 8-byte store for each header, never a block copy
    that a signal could interrupt within a word.
    """
    for step in steps:
        if step.values.ndim == 1:
            table[:, step.first][positions] = step.values
        else:
            table[positions, step.first : step.first + step.values.shape[1]] = step.values


def read_rows(table: Words, positions: SlotArray) -> NDArray[np.void]:
    """Return a copy of the rows at *positions*, whatever their states are."""
    rows = header_rows(len(positions))
    raw = np.ascontiguousarray(table[positions, ROW_WORD:]).view(np.uint8).reshape(len(positions), _ROW_BYTES)
    rows.view(np.uint8).reshape(len(positions), HEADER_ROW.itemsize)[:] = raw[:, : HEADER_ROW.itemsize]
    return rows


def scan(table: Words) -> Scan:
    """Read all headers of *table*, shape (slots, HEADER_WORDS)."""
    used = np.flatnonzero(table[:, MARK]).astype(np.int64)
    words = table[used]
    marks = words[:, MARK]
    checks = words[:, CHECK].copy()
    words[:, CHECK] = 0
    valid = check_of(words) == checks
    complete = valid & ((marks & _STATE_MASK) == SlotState.READY)
    ready, writing = used[complete], used[~complete]
    ready = ready[np.argsort(marks[complete], kind="stable")]
    writing_rows = read_rows(table, writing)
    writing_rows[~valid[~complete]] = np.zeros((), dtype=HEADER_ROW)
    sequence = int((marks[valid] >> _STATE_BITS).max(initial=np.uint64(0)))
    return Scan(ready, read_rows(table, ready), writing, writing_rows, sequence)
