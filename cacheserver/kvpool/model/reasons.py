# SPDX-License-Identifier: Apache-2.0
"""Closed sets of reasons: what a lookup's answer, a store's skip and a client's uncached state may name."""

from enum import StrEnum

__all__ = ["LookupReason", "UncachedReason"]


class LookupReason(StrEnum):
    """Why the prefix that a lookup found ends where it does."""

    ALL = "all"
    """Every chunk that was asked for is held."""
    MISSING = "missing"
    """Nobody stored the next chunk, or it was evicted."""
    INCOMPLETE = "incomplete"
    """Some shards or groups hold the next chunk, others do not."""
    OTHER_LAYOUT = "other_layout"
    """The model is known, but under another layout, dtype or parallel split; nothing of this namespace is held."""
    PIN_LIMIT = "pin_limit"
    """More is held, but pinning it would exceed the client's or the server's share."""
    SHORT = "short"
    """The prompt has no full chunk."""
    ENDED = "ended"
    """The request or lookup had ended before the lookup arrived."""


class UncachedReason(StrEnum):
    """Why an engine runs without the cache."""

    STARTING = "starting"
    """No handshake has been completed yet."""
    UNREACHABLE = "unreachable"
    """No server answers."""
    VERSION = "version"
    """No protocol version in common, or different digests."""
    CHUNK_TOKENS = "chunk_tokens"
    """The server's chunk is no whole number of engine blocks, or is another size than the digests were made for."""
    IDENTITY = "identity"
    """The server refuses this client's identity."""
    LAYOUT = "layout"
    """The server cannot keep this layout."""
    DRAINING = "draining"
    """The server is shutting down."""
    FAULT = "fault"
    """The client's own thread failed; it starts again by itself."""
    CLOSED = "closed"
    """The client was closed."""
