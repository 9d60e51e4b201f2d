# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half knows of each request, and its lookups: sent early, asked about often, never waited for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvpool.client.call import Call
from kvpool.client.jobs import Answer
from kvpool.connector.attach import Session
from kvpool.connector.chunks import ChunkKeys, EngineRequest
from kvpool.connector.wishes import Wishes
from kvpool.model.keys import DIGEST_BYTES
from kvpool.wire.messages import Cleared

__all__ = ["EARLY_LOOKUPS", "Counts", "Hits", "Lookups", "Tracked"]

EARLY_LOOKUPS: Final = 16
"""Requests whose lookup is sent on arrival; others are looked up when the scheduler asks: a long queue pins little."""

LEASE_SHARE: Final = 0.5
"""Part of a lookup's lease after which a request that still waits is looked up again."""


class Lookups(Protocol):
    """The client's scheduler adapter."""

    def lookup(self, request_id: str, digests: bytes, shards: tuple[int, ...]) -> None:
        """Ask for the longest prefix; replaces the request's former lookup."""

    def answer(self, request_id: str) -> Answer | None:
        """Return the answer, or None while it is pending."""

    def free(self, request_id: str, first: int, end: int) -> None:
        """Unpin chunks [first, end)."""

    def release(self, request_id: str) -> None:
        """Forget the request's lookup and unpin all of it."""

    def end(self, request_id: str) -> None:
        """The engine is done with the request."""

    def forget_failed(self, request_id: str) -> None:
        """A load failed: the request's lookup is over."""

    def clear(self, model: str) -> Sequence[Call[Cleared]]:
        """Ask every server to drop all that is kept of a model, held or not."""


@dataclass(slots=True)
class Tracked:
    """One request that the engine knows."""

    request: EngineRequest
    wishes: Wishes = field(default_factory=Wishes)
    objection: str | None = None
    """Why it is not cached; empty if it is, None before it was looked at."""

    chunk_tokens: int = 0
    digests: bytes = b""
    epoch: int = 0
    """Session of its lookup."""

    asked_s: float | None = None
    """When the lookup was sent; None if there is none."""

    answer: Answer | None = None
    local_tokens: int = 0
    loading: frozenset[int] = frozenset()
    """Blocks that a load is writing."""

    kept: int = 0
    """Chunks at the start that need no store (any more)."""

    written: bool = False
    """A store was planned: workers may read its blocks after its end."""

    failed: bool = False
    refused: bool = False
    """Its hit is not worth a load."""

    loaded_tokens: int = 0
    """Tokens of loads that were planned for it."""


@dataclass(slots=True)
class Counts:
    """Totals since the start."""

    lookups: int = 0
    hits: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    uncacheable_requests: int = 0


class Hits:
    """Finds out how much of a request the server holds. One thread calls it; no call waits."""

    def __init__(
        self,
        lookups: Lookups,
        *,
        loads: bool,
        shards: tuple[int, ...],
        keys: Callable[[int], ChunkKeys],
        whole: bool = True,
    ) -> None:
        """Make it.

        Args:
            lookups: the client's adapter.
            loads: False if this engine may not load.
            shards: all shards of a chunk.
            keys: makes digests for chunks of the given number of tokens.
            whole: a hit may be all of a prompt. Not where its last token, which the engine then computes again, is in a
                recurrent state already, or needs more of a window than a hit brings.
        """
        self._lookups = lookups
        self._loads = loads
        self._shards = shards
        self._make_keys = keys
        self._left_tokens = 0 if whole else 1
        self._keys: ChunkKeys | None = None
        self._unused: set[str] = set()
        """Requests with a lookup that has not been used or released."""
        self.counts = Counts()

    def early(self, tracked: Tracked, session: Session | None, now_s: float) -> None:
        """Send the lookup of a request that just arrived, unless many are out already."""
        if session is not None and len(self._unused) < EARLY_LOOKUPS and self._may_load(tracked, session):
            self._ask(tracked, session, now_s)

    def found(self, tracked: Tracked, session: Session | None, now_s: float) -> Answer | None:
        """Return the answer to the request's lookup, sending one if need be; None while it is pending."""
        if session is None or not self._may_load(tracked, session):
            self.release(tracked)
            return Answer(0)
        if not self._has_lookup(tracked, session, now_s):
            self._ask(tracked, session, now_s)
        if tracked.answer is None:
            tracked.answer = self._lookups.answer(tracked.request.request_id)
        return tracked.answer

    def use(self, tracked: Tracked, first: int, hit_tokens: int) -> None:
        """A load takes the chunks from *first* on: let go of those before, and of nothing else."""
        self._count(tracked, hit_tokens)
        self._lookups.free(tracked.request.request_id, 0, first)
        self._settle(tracked)

    def release(self, tracked: Tracked) -> None:
        """Let go of a lookup that nothing will be loaded from."""
        if tracked.asked_s is not None:
            if tracked.answer is not None:
                self._count(tracked, 0)
            self._lookups.release(tracked.request.request_id)
            self._settle(tracked)

    def failed(self, tracked: Tracked) -> None:
        """A load failed: the request sees misses from now on, or it would fail for ever."""
        tracked.failed, tracked.kept = True, 0
        self._lookups.forget_failed(tracked.request.request_id)

    def end(self, tracked: Tracked) -> None:
        """The engine is done with the request."""
        self._unused.discard(tracked.request.request_id)
        if tracked.epoch:
            self._lookups.end(tracked.request.request_id)

    def clear(self, model: str) -> Sequence[Call[Cleared]]:
        """Ask every server to drop all that is kept of a model."""
        return self._lookups.clear(model)

    def cacheable(self, tracked: Tracked, session: Session) -> bool:
        """Fit the request to the session's chunks; False if its content cannot be identified."""
        if self._keys is None or self._keys.chunk_tokens != session.chunk_tokens:
            self._keys = self._make_keys(session.chunk_tokens)
        if tracked.chunk_tokens != session.chunk_tokens:
            tracked.chunk_tokens, tracked.digests, tracked.kept = session.chunk_tokens, b"", 0
        if tracked.objection is None:
            tracked.objection = self._keys.objection(tracked.request)
            self.counts.uncacheable_requests += bool(tracked.objection)
        return not tracked.objection

    def extend(self, tracked: Tracked, end_tokens: int) -> int:
        """Make digests of the full chunks in the first *end_tokens*; returns how many there are now."""
        assert self._keys is not None
        tracked.digests = self._keys.extend(tracked.request, tracked.digests, end_tokens)
        return len(tracked.digests) // DIGEST_BYTES

    def _may_load(self, tracked: Tracked, session: Session) -> bool:
        request = tracked.request
        return (
            self._loads
            and not tracked.failed
            and tracked.wishes.load
            and not request.skip_reading_prefix_cache
            and self._most_tokens(tracked) >= session.chunk_tokens
            and self.cacheable(tracked, session)
        )

    def _ask(self, tracked: Tracked, session: Session, now_s: float) -> None:
        request_id = tracked.request.request_id
        end = self._most_tokens(tracked)
        self.extend(tracked, end)
        if tracked.epoch:
            self._lookups.release(request_id)
        self._lookups.lookup(request_id, tracked.digests[: end // tracked.chunk_tokens * DIGEST_BYTES], self._shards)
        tracked.asked_s, tracked.answer, tracked.epoch = now_s, None, session.epoch
        self._unused.add(request_id)

    def _most_tokens(self, tracked: Tracked) -> int:
        most, wished = tracked.request.num_tokens - self._left_tokens, tracked.wishes.max_load_tokens
        return most if wished is None else min(most, wished)

    def _has_lookup(self, tracked: Tracked, session: Session, now_s: float) -> bool:
        return (
            tracked.asked_s is not None
            and tracked.epoch == session.epoch
            and now_s - tracked.asked_s < LEASE_SHARE * session.lookup_lease_s
        )

    def _settle(self, tracked: Tracked) -> None:
        tracked.asked_s = tracked.answer = None
        self._unused.discard(tracked.request.request_id)

    def _count(self, tracked: Tracked, hit_tokens: int) -> None:
        self.counts.lookups += 1
        self.counts.hits += hit_tokens > 0
        self.counts.lookup_tokens += tracked.request.num_tokens - tracked.local_tokens
        self.counts.hit_tokens += hit_tokens
