# SPDX-License-Identifier: Apache-2.0
"""Fetching chunks."""

from typing import Annotated

from msgspec import Meta

from kvpool.wire.basics import Count, Id128, Reply, Request, Small

__all__ = ["Bytes", "CommitRetrieve", "PrepareRetrieve", "ReadChunk", "Readable", "Retrieved"]


class Readable(Reply, frozen=True, kw_only=True, tag="readable"):
    """Answer to PrepareRetrieve. Raw frames: placements, 16-byte checksums, u1 kinds (0: none, or not to verify)."""

    chunks: Count
    grant: Annotated[bytes, Meta(max_length=64)] = b""
    """What the ring's moves name to read chunks in place; empty without a ring."""


class PrepareRetrieve(Request[Readable], frozen=True, kw_only=True, tag="prepare_retrieve"):
    """Asks where chunks [first, end) of a lookup lie, for one group and shard."""

    lookup_id: Id128
    group: Small = 0
    shard: Small = 0
    first: Count = 0
    end: Count


class Bytes(Reply, frozen=True, kw_only=True, tag="bytes"):
    """Answer to ReadChunk. Raw frames: the piece."""


class ReadChunk(Request[Bytes], frozen=True, kw_only=True, tag="read_chunk"):
    """Streamed mode: one piece of one chunk's bytes."""

    lookup_id: Id128
    chunk: Count
    offset: Count
    length: Annotated[int, Meta(ge=1)]
    group: Small = 0
    shard: Small = 0


class Retrieved(Reply, frozen=True, kw_only=True, tag="retrieved"):
    """Answer to CommitRetrieve. Raw frames: u1 dispositions (VOUCHED or LOST), one a chunk."""

    vouched: Count


class CommitRetrieve(Request[Retrieved], frozen=True, kw_only=True, tag="commit_retrieve"):
    """Ends the reading of chunks [first, end) by one reader and asks whether the bytes were the chunks' all along.

    Only vouched bytes may be used. Raw frames: u1 a chunk (1: the client found its checksum wrong). The reader's pins
    on the range are released.
    """

    lookup_id: Id128
    group: Small = 0
    shard: Small = 0
    first: Count = 0
    end: Count
    moving: bool = False
    """A mover is still at it: answered once it has moved all that was granted, and refused if the load ends otherwise,
    by the same request without this, say. For servers with the feature MOVING."""
