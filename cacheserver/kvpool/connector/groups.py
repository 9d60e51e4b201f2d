# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request hold a chunk, for each kind of cache group. Pure.

A request has one block table a group, with the null block (id 0) where the engine keeps nothing: outside a sliding
window, and everywhere but at the states that it saves.

    FULL    a chunk is all of its blocks, and a prefix needs all of its chunks
    WINDOW  a chunk is all of its blocks, but those before the window at the chunk's own end may be missing; a prefix
            needs the chunks that reach into the window at its end
    STATE   a chunk is the block with the state at its end, which exists only where the engine's step ended there; a
            prefix needs its last chunk's
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kvpool.connector.plan import GroupFacts
from kvpool.model.identity import GroupKind
from kvpool.model.layout import NOWHERE

__all__ = ["Part", "Table", "Tables", "blocks_per_chunk", "load_part", "store_parts"]

Table = Sequence[int]
Tables = Sequence[Table]
"""One table for each of the engine's groups."""


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks [first, end) of one group."""

    first: int
    end: int
    blocks: bytes
    """Block ids (little-endian int64), ``end - first`` chunks of them; NOWHERE where there is no block."""

    skip_blocks: int = 0
    """Loads: blocks at the start that are left alone."""


def blocks_per_chunk(group: GroupFacts, chunk_tokens: int) -> int:
    """Return how many blocks of one group make a chunk."""
    return 1 if group.kind is GroupKind.STATE else chunk_tokens // group.block_tokens


def load_part(
    group: GroupFacts, table: Table, chunks: tuple[int, int], chunk_tokens: int, local_tokens: int
) -> Part | None:
    """Return what one group must load so that the prefix up to ``chunks[1]`` is there; None if nothing.

    Args:
        group: the group.
        table: the request's blocks of this group.
        chunks: [first, end) of the load: chunks before the first are there already.
        chunk_tokens: tokens of one chunk.
        local_tokens: tokens that the engine holds itself; their blocks may be shared and are never written.

    Raises:
        ValueError: a block that must be written is missing.
    """
    first, end = chunks
    if group.kind is GroupKind.STATE:
        return Part(end - 1, end, _checked(_states(group, table, end - 1, end, chunk_tokens), 0))
    if group.kind is GroupKind.WINDOW:
        first = max(first, end + -group.window_tokens // chunk_tokens)
    ids = _rows(group, table, first, end, chunk_tokens)
    local = max(0, local_tokens // group.block_tokens - first * blocks_per_chunk(group, chunk_tokens))
    present = np.flatnonzero(ids[local:])
    if group.kind is GroupKind.WINDOW and not present.size:
        return None
    skip = local + (int(present[0]) if group.kind is GroupKind.WINDOW else 0)
    return Part(first, end, _checked(ids, skip), skip)


def store_parts(
    group: GroupFacts,
    table: Table,
    chunks: tuple[int, int],
    chunk_tokens: int,
    states: Mapping[int, int],
) -> Iterator[Part]:
    """Yield the chunks of one group that can be stored, in runs without gaps.

    Args:
        group: the group.
        table: the request's blocks of this group after the step.
        chunks: [first, end) of what the step completes.
        chunk_tokens: tokens of one chunk.
        states: STATE groups: tokens at whose end the engine saved a state in this step, with its block.

    Raises:
        ValueError: a block of a FULL group is missing.
    """
    first, end = chunks
    if group.kind is GroupKind.STATE:
        for tokens, block in sorted(states.items()):
            if not tokens % chunk_tokens and tokens <= end * chunk_tokens and block:
                at = tokens // chunk_tokens
                yield Part(at - 1, at, np.array([block], dtype="<i8").tobytes())
        return
    ids = _rows(group, table, first, end, chunk_tokens)
    if group.kind is GroupKind.FULL:
        yield Part(first, end, _checked(ids, 0))
        return
    rows = ids.reshape(end - first, -1)
    needed = min(rows.shape[1], max(1, -(-(group.window_tokens - 1) // group.block_tokens)))
    usable = (rows[:, -needed:] != 0).all(axis=1)
    rows = np.where(rows == 0, NOWHERE, rows)
    for is_usable, run in groupby(range(end - first), key=usable.__getitem__):
        if is_usable:
            numbers = [*run]
            yield Part(first + numbers[0], first + numbers[-1] + 1, rows[numbers].astype("<i8").tobytes())


def _rows(group: GroupFacts, table: Table, first: int, end: int, chunk_tokens: int) -> NDArray[np.int64]:
    per_chunk = blocks_per_chunk(group, chunk_tokens)
    ids = np.array(table[first * per_chunk : end * per_chunk], dtype="<i8")
    if ids.size != (end - first) * per_chunk:
        raise ValueError(f"chunks {first} to {end} are not all in blocks of the request: {len(table)} blocks")
    return ids


def _states(group: GroupFacts, table: Table, first: int, end: int, chunk_tokens: int) -> NDArray[np.int64]:
    ends = [chunk * chunk_tokens // group.block_tokens - 1 for chunk in range(first + 1, end + 1)]
    if ends[-1] >= len(table):
        raise ValueError(f"the state at the end of chunk {end - 1} has no place in {len(table)} blocks")
    return np.array([table[at] for at in ends], dtype="<i8")


def _checked(ids: NDArray[np.int64], skip: int) -> bytes:
    if not ids[skip:].all():
        raise ValueError(f"blocks of whole chunks are missing: {ids[skip:].tolist()}")
    return ids.tobytes()
