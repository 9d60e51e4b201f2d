# SPDX-License-Identifier: Apache-2.0
"""What a client caches, and how its bytes move."""

from typing import Annotated

from msgspec import Meta

from kvpool.model.identity import GroupSpec, Mode, Namespace
from kvpool.wire.basics import Reply, Request, Small

__all__ = ["Register", "Registered", "Unregister", "Unregistered"]


class Registered(Reply, frozen=True, kw_only=True, tag="registered"):
    """Answer to Register."""

    mode: Mode
    """How this client's bytes will move."""

    reason: str
    """Why that mode, for people."""


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


class Unregistered(Reply, frozen=True, kw_only=True, tag="unregistered"):
    """Answer to Unregister."""

    known: bool


class Unregister(Request[Unregistered], frozen=True, kw_only=True, tag="unregister"):
    """Ends the client: its leases, its writes under way and its connections."""
