# SPDX-License-Identifier: Apache-2.0
"""What is asked of the server itself."""

from typing import Annotated

from msgspec import Meta

from kvpool.wire.basics import Count, Reply, Request

__all__ = ["Clear", "Cleared", "Locate", "Located", "Ping", "Pong", "Statistics", "Stats"]


class Cleared(Reply, frozen=True, kw_only=True, tag="cleared"):
    """Answer to Clear."""

    chunks: Count
    kept: Count
    """Chunks that stayed because somebody holds them."""


class Clear(Request[Cleared], frozen=True, kw_only=True, tag="clear"):
    """Drops the chunks of the caller's tenant; with *forced* also those that are pinned (their loads will fail)."""

    model: str = ""
    """Only namespaces of this model; empty means all."""

    forced: bool = False


class Statistics(Reply, frozen=True, kw_only=True, tag="statistics"):
    """Answer to Stats: numbers without any client's name; counters count since the server's start."""

    server_id: str
    server_version: str
    uptime_s: float
    ready: bool
    draining: bool
    chunk_tokens: int
    l1_bytes: int
    l1_used_bytes: int
    l1_pinned_bytes: int
    chunks: int
    clients: int
    sessions: int
    leases: int
    oldest_lease_s: float
    counters: dict[str, float]
    """Metric name with labels as in the exposition format, e.g. ``kvpool_lookups_total{result="hit"}``."""


class Stats(Request[Statistics], frozen=True, kw_only=True, tag="stats"):
    """Numbers of the server; needs a Hello of any kind."""


class Located(Reply, frozen=True, kw_only=True, tag="located"):
    """Answer to Locate."""

    addresses: tuple[str, ...] = ()
    """Where that server may be; who asks it for its id knows. None if this server cannot tell."""


class Locate(Request[Located], frozen=True, kw_only=True, tag="locate"):
    """Asks where another server of the pool is; needs a Hello of any kind."""

    server_id: Annotated[str, Meta(min_length=1, max_length=253)]


class Pong(Reply, frozen=True, kw_only=True, tag="pong"):
    """Answer to Ping."""

    draining: bool = False
    """The server takes no new work: a client that only keeps its heart beating need not find that out by a refusal."""


class Ping(Request[Pong], frozen=True, kw_only=True, tag="ping"):
    """Shows that the client lives; needs a Hello."""
