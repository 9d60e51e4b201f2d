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
    "Direction",
    "Forget",
    "FromClient",
    "FromMover",
    "FromServer",
    "Grant",
    "Join",
    "Joined",
    "Move",
    "Moved",
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
    handle: Handle
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
    """Chunks that the client may move, one way."""

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


FromServer = Start | Segment | Forget | Grant | Revoke
FromMover = Ready | Revoked | Broken
FromClient = Join | Move
ToClient = Joined | Moved
