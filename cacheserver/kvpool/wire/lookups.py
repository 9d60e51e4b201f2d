# SPDX-License-Identifier: Apache-2.0
"""Finding a prefix, and letting go of it."""

from typing import Annotated

from msgspec import Meta

from kvpool.wire.basics import Count, Id128, Reply, Request, RequestId, Small

__all__ = ["EndRequest", "Ended", "Found", "FreeLookup", "Freed", "Lookup", "LookupStatus"]


class Found(Reply, frozen=True, kw_only=True, tag="found"):
    """Answer to Lookup and LookupStatus."""

    chunks: Count
    """Length of the prefix that is pinned for the lookup, in chunks."""

    coming: Count = 0
    """Chunks right behind it that another client or a tier is still bringing; 0 means that the answer is final."""

    reason: str = ""
    """Why the prefix ends there: a ``kvpool.model.reasons.LookupReason``."""


class Lookup(Request[Found], frozen=True, kw_only=True, tag="lookup"):
    """Longest prefix that all *shards* (and all groups) hold; pins it. Raw frames: digests (32 bytes a chunk).

    A second lookup of the same request replaces the first one.
    """

    request_id: RequestId
    lookup_id: Id128
    shards: Annotated[tuple[Small, ...], Meta(min_length=1, max_length=1024)] = (0,)


class LookupStatus(Request[Found], frozen=True, kw_only=True, tag="lookup_status"):
    """How a lookup stands now; waits up to *wait_s* for it to become final."""

    lookup_id: Id128
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0


class Freed(Reply, frozen=True, kw_only=True, tag="freed"):
    """Answer to FreeLookup."""

    chunks: Count
    """Chunks of which this call released a pin; 0 if all were free before."""


class FreeLookup(Request[Freed], frozen=True, kw_only=True, tag="free_lookup"):
    """Unpins chunks [first, end) of a lookup, in all groups and shards; idempotent, unknown ids leave a tombstone."""

    lookup_id: Id128
    first: Count = 0
    end: Annotated[int, Meta(ge=0, le=1 << 31)] = 1 << 31


class Ended(Reply, frozen=True, kw_only=True, tag="ended"):
    """Answer to EndRequest."""

    leases: Count
    """Lookups and stores that this ended."""


class EndRequest(Request[Ended], frozen=True, kw_only=True, tag="end_request"):
    """The engine is done with a request: all its lookups are freed. Idempotent; leaves a tombstone.

    A store under way is not cut off by it: its writer commits or abandons it.
    """

    request_id: RequestId
