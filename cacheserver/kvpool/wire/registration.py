# SPDX-License-Identifier: Apache-2.0
"""What a client caches, how its bytes move, and what becomes of its ring."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from kvpool.model.identity import GroupSpec, Mode, Namespace
from kvpool.wire.basics import Count, Reason, Reply, Request, Small

__all__ = [
    "CacheFacts",
    "Register",
    "Registered",
    "RingFacts",
    "RingNews",
    "RingState",
    "Unregister",
    "Unregistered",
    "WatchRing",
]


class RingFacts(Struct, frozen=True, kw_only=True):
    """A ring in device memory that the client allocated and exported."""

    device: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """UUID of the device."""

    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    """The driver's handle of the allocation: slots of the store lane, then those of the load lane."""

    slot_bytes: Annotated[int, Meta(ge=1)]
    slots: Annotated[int, Meta(ge=1, le=1024)]
    """Of each lane."""

    generation: Count
    """Another one for each Register: what was said of a former one is void."""


class CacheFacts(Struct, frozen=True, kw_only=True):
    """A cache in device memory that the client exports to its mover, and the ring that the mover is to allocate."""

    device: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """UUID of the device."""

    slot_bytes: Annotated[int, Meta(ge=1)]
    slots: Annotated[int, Meta(ge=1, le=1024)]
    """Of each lane."""

    generation: Count
    """As that of a ring."""


class Registered(Reply, frozen=True, kw_only=True, tag="registered"):
    """Answer to Register."""

    mode: Mode
    """How this client's bytes will move. In modes ring and mapped they are streamed while the mover is not joined."""

    reason: str
    """Why that mode, for people; also why not a mode that the client would have preferred."""


class Register(Request[Registered], frozen=True, kw_only=True, tag="register"):
    """Declares what a client caches; a second one replaces the first.

    A scheduler registers the same namespace and groups as its workers and all of their shards.
    """

    namespace: Namespace
    groups: Annotated[tuple[GroupSpec, ...], Meta(min_length=1, max_length=64)]
    shards: Annotated[tuple[Small, ...], Meta(min_length=1, max_length=1024)]
    readers: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Ranks on this server that each load the same shard (MLA)."""

    modes: tuple[Mode, ...] = ()
    """What the client can do, in order of preference; empty for one that moves no bytes."""

    ring: RingFacts | None = None
    """Needed for mode ring."""

    process_id: Count = 0
    """The client's, in its own namespace: its mover gets another one, or the driver would refuse the ring."""

    no_ring: Reason = ""
    """Why a client that could have a ring has none, for people."""

    cache: CacheFacts | None = None
    """Needed for mode mapped."""


class RingState(StrEnum):
    """How a client's ring stands at the server."""

    STARTING = "starting"
    READY = "ready"
    """The mover waits at ``address``."""

    ENDING = "ending"
    """The mover is being ended; what it copies may still go on."""

    OVER = "over"
    """The mover does not exist any more, or never did: the ring's memory is the client's alone."""


class RingNews(Reply, frozen=True, kw_only=True, tag="ring_news"):
    """Answer to WatchRing."""

    state: RingState
    address: str = ""
    """``unix:`` and a name beside the socket that the client reached, or ``tcp:`` and a port of the same host."""

    secret: Annotated[bytes, Meta(max_length=64)] = b""
    """To be shown to the mover."""

    reason: str = ""
    """Why it ends or ended."""


class WatchRing(Request[RingNews], frozen=True, kw_only=True, tag="watch_ring"):
    """Says how the client stands with its ring, and waits up to *wait_s* for something that it does not know yet.

    A second one of the same client ends the first.
    """

    joined: bool = False
    """True: chunks of this client's stores and loads may go through the ring."""

    retired: Reason = ""
    """Why the client uses its ring no more; the mover is ended."""

    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0


class Unregistered(Reply, frozen=True, kw_only=True, tag="unregistered"):
    """Answer to Unregister."""

    known: bool


class Unregister(Request[Unregistered], frozen=True, kw_only=True, tag="unregister"):
    """Ends the client: its leases, its writes under way and its connections."""
