# SPDX-License-Identifier: Apache-2.0
"""What the server, a mover and its client say to each other. Nothing here is negotiated.

A mover is of its server's version; a client may be one release older or newer, so fields between those two come with a
default under which the other side does nothing wrong.

The client names chunks by a *grant* that the server gave to the mover, never by address: it can reach no other bytes.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from kvpool.transfer.cuda import HANDLE_BYTES, UUID_BYTES

__all__ = [
    "Broken",
    "CacheGroup",
    "CachePlane",
    "Cancel",
    "Direction",
    "Done",
    "Export",
    "Exported",
    "Forget",
    "FromClient",
    "FromMover",
    "FromServer",
    "Grant",
    "Job",
    "Join",
    "Joined",
    "Move",
    "Moved",
    "Piece",
    "Ready",
    "Revoke",
    "Revoked",
    "Ring",
    "Segment",
    "Start",
    "ToClient",
]

Count = Annotated[int, Meta(ge=0)]
Handle = Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
Uuid = Annotated[bytes, Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]
GrantId = Annotated[bytes, Meta(min_length=1, max_length=64)]


class Direction(StrEnum):
    """Which way a lane of the ring moves."""

    STORE = "store"
    LOAD = "load"


class Ring(Struct, frozen=True, kw_only=True):
    """A client's ring: slots of the store lane, then those of the load lane, in one allocation."""

    device: Uuid
    handle: Annotated[bytes, Meta(max_length=HANDLE_BYTES)]
    """Empty in mode mapped: the mover allocates the ring, and gathers into it out of the cache that the client exports.
    """

    slot_bytes: Annotated[int, Meta(ge=1)]
    slots: Annotated[int, Meta(ge=1, le=1024)]
    """Of each lane."""

    generation: Count
    """Another ring of the same client has another number."""

    def offset(self, direction: Direction, slot: int) -> int:
        """Return where a slot begins in the allocation."""
        return (slot + (self.slots if direction is Direction.LOAD else 0)) * self.slot_bytes

    @property
    def length(self) -> int:
        """Bytes of the allocation."""
        return 2 * self.slots * self.slot_bytes


# Server to mover, over the socket that the mover was born with


class Start(Struct, frozen=True, kw_only=True, tag="start"):
    """The first message."""

    ring: Ring
    secret: Annotated[bytes, Meta(min_length=16, max_length=64)]
    """Whoever joins must show it."""

    listen: str
    """``unix:`` and a path, or ``tcp:host:port``, where port 0 takes a free one."""


class Segment(Struct, frozen=True, kw_only=True, tag="segment"):
    """Memory of the arena, whose descriptor comes with the message."""

    memory: Count
    """Its number, as in ``PLACEMENT``; it never stands for other memory."""

    length: Annotated[int, Meta(ge=1)]


class Forget(Struct, frozen=True, kw_only=True, tag="forget"):
    """Give memory of the arena back. No grant that is not revoked has chunks in it."""

    memory: Count


class Grant(Struct, frozen=True, kw_only=True, tag="grant"):
    """Chunks that the client may move, one way. It ends by itself, with Revoked, once all of it came."""

    grant: GrantId
    direction: Direction
    rows: bytes
    """``PLACEMENT``, one a chunk; disposition 0: not this one."""

    checks: bytes = b""
    """``CHECK``, one a chunk, or nothing at all. Stores: the kind of checksum to make. Loads: what a chunk must have
    before it is copied. Kind 0: neither."""


class Revoke(Struct, frozen=True, kw_only=True, tag="revoke"):
    """No copy of the grant may begin any more; answered by Revoked once none runs."""

    grant: GrantId


# Mover to server


class Ready(Struct, frozen=True, kw_only=True, tag="ready"):
    """The mover has the ring and listens."""

    address: str


class Revoked(Struct, frozen=True, kw_only=True, tag="revoked"):
    """No copy of the grant runs or will ever run."""

    grant: GrantId
    moved_bytes: Count = 0
    checks: bytes = b""
    """Of a store for which checksums were asked: ``CHECK``, one a chunk; kind 0: none was made."""

    verified: Count = 0
    """Of a load: chunks that had the right checksum."""

    wrong: tuple[Count, ...] = ()
    """Of a load: rows of the grant that had another one."""


class Broken(Struct, frozen=True, kw_only=True, tag="broken"):
    """The mover cannot go on, and ends."""

    detail: str


# Client to mover: one connection for each direction


class Join(Struct, frozen=True, kw_only=True, tag="join"):
    """The first message of a connection."""

    secret: bytes
    direction: Direction
    generation: Count


class Move(Struct, frozen=True, kw_only=True, tag="move"):
    """Copy between a slot and the same part of some chunks, one after the other in the slot."""

    turn: Count
    """Counts the moves of a lane; the answer repeats it."""

    slot: Count
    grant: GrantId
    offset: Count
    """Where the part begins in each chunk."""

    length: Annotated[int, Meta(ge=1)]
    """Bytes of the part."""

    chunks: tuple[Count, ...]
    """Rows of the grant."""


# Client to mover in mode mapped, beside Join. What it exports goes over the connection for stores, before any job.


class Piece(Struct, frozen=True, kw_only=True, tag="piece"):
    """Device memory of the client's cache. Pieces of one memory follow each other without a gap."""

    memory: Annotated[int, Meta(ge=0, lt=65536)]
    """Counts them."""

    length: Annotated[int, Meta(ge=1)]
    handle: Handle | None = None
    """The driver's handle of a whole allocation, which is a memory's only piece. None: a descriptor of virtual memory
    comes with the message."""


class CachePlane(Struct, frozen=True, array_like=True):
    """One run of bytes in each block: block *b* begins at ``offset + b * stride`` of a memory."""

    memory: Count
    offset: Count
    stride: Count
    block_bytes: Annotated[int, Meta(ge=1)]


class CacheGroup(Struct, frozen=True, kw_only=True):
    """One cache group."""

    planes: Annotated[tuple[CachePlane, ...], Meta(min_length=1)]
    blocks: Annotated[int, Meta(ge=1)]
    blocks_per_chunk: Annotated[int, Meta(ge=1)]


class Export(Struct, frozen=True, kw_only=True, tag="export"):
    """All pieces were sent; this is what lies in them. Answered by Exported."""

    groups: Annotated[tuple[CacheGroup, ...], Meta(min_length=1)]


class Job(Struct, frozen=True, kw_only=True, tag="job"):
    """Move chunks of a grant between the arena and blocks of the cache. Answered by Done; jobs run in their order."""

    job: Count
    """Another one is greater than all before it on the connection."""

    group: Count
    grant: GrantId
    chunks: Annotated[tuple[Count, ...], Meta(min_length=1)]
    """Rows of the grant."""

    ids: bytes
    """Blocks of these chunks, little-endian 64-bit numbers, in token order; NOWHERE where none is touched."""


class Cancel(Struct, frozen=True, kw_only=True, tag="cancel"):
    """Begin nothing more of a job; it is answered by Done once nothing of it runs."""

    job: Count


# Mover to client


class Joined(Struct, frozen=True, kw_only=True, tag="joined"):
    """The connection is accepted."""


class Moved(Struct, frozen=True, kw_only=True, tag="moved"):
    """A move ended; of a store, its bytes are in the arena and the slot is free; of a load, the slot is full."""

    turn: Count
    error: str = ""
    """Empty if all bytes were copied; else none of them may be used."""

    wrong: tuple[Count, ...] = ()
    """Of a load with an error: chunks of the move that are not what was stored. The others can be asked for again."""

    copy_s: float = 0.0
    """From queueing the copies to their end."""


class Exported(Struct, frozen=True, kw_only=True, tag="exported"):
    """The cache is mapped, or why it cannot be."""

    error: str = ""


class Done(Struct, frozen=True, kw_only=True, tag="done"):
    """Nothing of a job runs any more; what did not fail is in the arena, or in the client's blocks."""

    job: Count
    error: str = ""
    """Why chunks failed, for people."""

    failed: tuple[Count, ...] = ()
    """Chunks that were not moved, or not whole."""

    wrong: tuple[Count, ...] = ()
    """Of a load: those among them that are not what was stored."""


FromServer = Start | Segment | Forget | Grant | Revoke
FromMover = Ready | Revoked | Broken
FromClient = Join | Move | Piece | Export | Job | Cancel
ToClient = Joined | Moved | Exported | Done
