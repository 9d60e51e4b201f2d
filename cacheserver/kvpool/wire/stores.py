# SPDX-License-Identifier: Apache-2.0
"""Bringing chunks."""

from typing import Annotated

from msgspec import Meta

from kvpool.wire.basics import Count, Id128, Reply, Request, RequestId, Small

__all__ = ["CommitStore", "PrepareStore", "Prepared", "Stored", "WriteChunk", "Wrote"]


class Prepared(Reply, frozen=True, kw_only=True, tag="prepared"):
    """Answer to PrepareStore. Raw frames: placements (``kvpool.model.slots.PLACEMENT``, one a chunk)."""

    write: Count
    """Chunks to be written."""

    grant: Annotated[bytes, Meta(max_length=64)] = b""
    """What the ring's moves name; empty if the bytes go another way."""


class PrepareStore(Request[Prepared], frozen=True, kw_only=True, tag="prepare_store"):
    """Asks where chunks [first, first + n) go. Raw frames: digests (32 bytes a chunk).

    Chunks that are there already or that another client is writing are not to be sent.
    """

    request_id: RequestId
    store_id: Id128
    group: Small = 0
    shard: Small = 0
    first: Count = 0
    parent: Annotated[bytes, Meta(max_length=32)] = b""
    """Digest of chunk first - 1; empty when first is 0 (or unknown)."""


class Wrote(Reply, frozen=True, kw_only=True, tag="wrote"):
    """Answer to WriteChunk; gives its credit back."""


class WriteChunk(Request[Wrote], frozen=True, kw_only=True, tag="write_chunk"):
    """Streamed mode: one piece of one chunk's bytes. Raw frames: the piece.

    Pieces of a chunk are sent in order, without gaps.
    """

    store_id: Id128
    chunk: Count
    offset: Count


class Stored(Reply, frozen=True, kw_only=True, tag="stored"):
    """Answer to CommitStore. Raw frames: u1 dispositions (STORED, ABANDONED, or what Prepared said), one a chunk."""

    stored: Count


class CommitStore(Request[Stored], frozen=True, kw_only=True, tag="commit_store"):
    """Ends a store. Raw frames: u1 a chunk of the PrepareStore (1: its bytes are complete), then 16-byte checksums.

    After it the client writes to none of the slots again. Chunks not marked complete are dropped.
    """

    store_id: Id128
    checksum_kind: Annotated[int, Meta(ge=0, le=255)] = 0
    moving: bool = False
    """A mover is still at it: answered once it has moved all that was granted, and refused if the store ends otherwise,
    by the same request without this, say. For servers with the feature MOVING."""
