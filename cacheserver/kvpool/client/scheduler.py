# SPDX-License-Identifier: Apache-2.0
"""The scheduler's adapter: lookups that never block a step.

Nothing is sent again after a lost session: its leases died with it at the server, so a FreeLookup or EndRequest that
could not be sent is done already.
"""

import os
from collections import Counter
from dataclasses import dataclass
from time import monotonic
from typing import Final

from kvpool.client.call import Call
from kvpool.client.jobs import Answer
from kvpool.client.link import Link
from kvpool.config import ClientConfig
from kvpool.model.errors import DeadlineExceeded
from kvpool.model.keys import DIGEST_BYTES
from kvpool.wire.messages import Clear, Cleared, EndRequest, Found, FreeLookup, Lookup, LookupStatus

__all__ = ["SchedulerAdapter"]

_MISS: Final = Answer(0)
_EVERYTHING: Final = 1 << 31
_REQUESTS: Final = 1 << 16
"""More lookups than this are not remembered; the oldest goes first. An engine ends its requests, so none should."""


@dataclass(slots=True)
class _Lookup:
    """One request's lookup."""

    lookup_id: bytes
    digests: bytes
    shards: tuple[int, ...]
    epoch: int
    ends_s: float
    call: Call[Found] | None
    chunks: int = 0
    most: int = _EVERYTHING
    """Chunks beyond this one matter to nobody."""

    final: Answer | None = None


class SchedulerAdapter:
    """Looks up, remembers and frees, for one engine. One thread (the scheduler's) calls it; no call waits."""

    def __init__(self, link: Link, config: ClientConfig) -> None:
        self._link = link
        self._config = config
        self._lookups: dict[str, _Lookup] = {}
        self._failed: dict[str, None] = {}
        self._counts: Counter[str] = Counter()

    def lookup(
        self, request_id: str, digests: bytes, shards: tuple[int, ...] = (0,), lookup_id: bytes | None = None
    ) -> None:
        """Begin a lookup of the prefix that *digests* (32 bytes a chunk) chain; *lookup_id*: instead of a random one.

        Nothing happens if the same was asked for this request and not released since. Other digests replace the former
        lookup and its pins.
        """
        known = self._lookups.get(request_id)
        if known is not None and (known.digests, known.shards) == (digests, shards):
            return
        state = self._link.state
        usable = self._link.role.loads and request_id not in self._failed
        if not (digests and usable and state.healthy and state.welcome is not None):
            self.release(request_id)
            self._remember(request_id, _Lookup(b"", digests, shards, state.epoch, 0.0, None, final=_MISS))
            return
        asked = digests[: state.welcome.limits.chunks * DIGEST_BYTES]
        lookup_id = lookup_id or os.urandom(16)
        call = self._link.submit(
            Lookup(request_id=request_id, lookup_id=lookup_id, shards=shards),
            (asked,),
            deadline_s=self._config.lookup_s,
            epoch=state.epoch,
        )
        ends_s = monotonic() + self._config.lookup_s
        self._remember(request_id, _Lookup(lookup_id, digests, shards, state.epoch, ends_s, call))

    def answer(self, request_id: str) -> Answer | None:
        """Return how the lookup ended, or None while it has not. The same again until something changes it.

        A miss for a request that nobody looked up, without a server, after its session's end, or after ``lookup_s``
        without an answer. Chunks that are still coming are waited for until then.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None or request_id in self._failed:
            return _MISS
        if lookup.final is None:
            self._look(lookup)
        if lookup.final is not None and lookup.final.chunks and not self._alive(lookup):
            # What was pinned went with the session.
            lookup.final = _MISS
        return lookup.final

    def limit(self, request_id: str, chunks: int) -> int:
        """No more than *chunks* of the request's lookup matter: unpin what lies beyond and wait for no more of it.

        Returns:
            chunks that are known to have been pinned for nothing.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return 0
        surplus = max(0, (lookup.chunks if lookup.final is None else lookup.final.chunks) - chunks)
        lookup.most, lookup.chunks = min(lookup.most, chunks), min(lookup.chunks, chunks)
        if lookup.final is None and lookup.chunks == lookup.most:
            self._settle(lookup, "cut_short")
        elif lookup.final is None:
            self._unpin(lookup, chunks)
        elif lookup.final.chunks > chunks:
            self._unpin(lookup, chunks)
            lookup.final = Answer(chunks, lookup.lookup_id) if chunks else _MISS
        return surplus

    def free(self, request_id: str, first: int, end: int) -> None:
        """Unpin chunks [first, end) of the request's lookup: nobody will load them."""
        if (lookup := self._lookups.get(request_id)) is not None and end > first:
            self._unpin(lookup, first, end)

    def release(self, request_id: str) -> None:
        """Forget the request's lookup and unpin all of it, so that the same digests can be looked up again."""
        if (lookup := self._lookups.pop(request_id, None)) is not None:
            self._unpin(lookup, 0)

    def end(self, request_id: str) -> None:
        """The engine is done with the request."""
        self._lookups.pop(request_id, None)
        self._failed.pop(request_id, None)
        if self._link.state.healthy:
            self._link.submit(EndRequest(request_id=request_id))

    def forget_failed(self, request_id: str) -> None:
        """A load of the request failed: from now until its end its lookups are misses, or it would fail for ever."""
        self.release(request_id)
        self._failed[request_id] = None
        while len(self._failed) > _REQUESTS:
            del self._failed[next(iter(self._failed))]

    def clear(self, model: str) -> tuple[Call[Cleared], ...]:
        """Ask the server to drop all that it keeps of a model for this tenant, also what is held."""
        return (self._link.submit(Clear(model=model, forced=True)),)

    def counters(self) -> dict[str, float]:
        """Return lookups that were answered, timed out or failed, since the start."""
        return {name: float(value) for name, value in self._counts.items()}

    def _look(self, lookup: _Lookup) -> None:
        """Bring *lookup* up to date; waits for nothing."""
        call, now_s = lookup.call, monotonic()
        if call is not None and call.done():
            lookup.call = None
            if (error := call.error()) is not None:
                self._settle(lookup, "timed_out" if isinstance(error, DeadlineExceeded) else "failed")
                return
            found, _ = call.result()
            lookup.chunks = min(found.chunks, lookup.most)
            if not found.coming or lookup.chunks == lookup.most:
                self._settle(lookup, "answered")
                return
            self._wait_for_more(lookup, now_s)
        if now_s >= lookup.ends_s:
            self._settle(lookup, "timed_out")

    def _wait_for_more(self, lookup: _Lookup, now_s: float) -> None:
        """Ask the server to answer again when the lookup's coming chunks are there."""
        if (left_s := lookup.ends_s - now_s) > 0:
            lookup.call = self._link.submit(
                LookupStatus(lookup_id=lookup.lookup_id, wait_s=left_s),
                deadline_s=left_s + self._config.request_s,
                epoch=lookup.epoch,
            )

    def _settle(self, lookup: _Lookup, how: str) -> None:
        """Make the lookup's answer final with what is pinned so far."""
        self._counts[f"lookups_{how}"] += 1
        self._counts["chunks_found"] += lookup.chunks
        lookup.final = Answer(lookup.chunks, lookup.lookup_id) if lookup.chunks else _MISS
        if how != "answered":
            # The server may still answer or bring more: it must not pin what nobody waits for.
            self._unpin(lookup, lookup.chunks)

    def _unpin(self, lookup: _Lookup, first: int, end: int = _EVERYTHING) -> None:
        if lookup.lookup_id and self._alive(lookup):
            self._link.submit(FreeLookup(lookup_id=lookup.lookup_id, first=first, end=end), epoch=lookup.epoch)

    def _alive(self, lookup: _Lookup) -> bool:
        state = self._link.state
        return state.healthy and state.epoch == lookup.epoch

    def _remember(self, request_id: str, lookup: _Lookup) -> None:
        # Put last: the oldest is the one that goes.
        self._lookups.pop(request_id, None)
        self._lookups[request_id] = lookup
        while len(self._lookups) > _REQUESTS:
            self._unpin(self._lookups.pop(next(iter(self._lookups))), 0)
