# SPDX-License-Identifier: Apache-2.0
"""One engine over several servers: each holds the shards of some of its ranks, and a chunk counts if all hold theirs.

    lookup -> all servers at once, under one id -> the smallest answer so far limits what the others pin and wait for

Each server has its own deadline. One that is down, slow, restarted or of another version counts as zero for the
lookups that it does not answer; the others are told at once, and nothing is raised.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from kvpool.client.call import Call
from kvpool.client.jobs import Answer
from kvpool.client.link import Link
from kvpool.client.scheduler import SchedulerAdapter
from kvpool.client.state import LinkState
from kvpool.config import ClientConfig
from kvpool.wire.messages import Cleared

__all__ = ["GroupScheduler", "Member", "lookup_id_of", "scheduler_over"]

_MISS: Final = Answer(0)
_UNKNOWN: Final = 1 << 31
_REQUESTS: Final = 1 << 16
"""More lookups than this are not remembered; the oldest goes first. An engine ends its requests, so none should."""


@dataclass(frozen=True, slots=True)
class Member:
    """One server of an engine."""

    label: str
    link: Link
    shards: tuple[int, ...]
    """Those that the server's ranks hold; other members may hold some of them, too."""

    stage: int = 0
    """Of the engine's pipeline: members of several stages may be at one server."""


@dataclass(slots=True)
class _Asked:
    """One request's lookup."""

    lookup_id: bytes
    """The same at all servers (``lookup_id_of``): ids are the client's, and each worker presents it to its own."""

    digests: bytes
    shards: tuple[int, ...]
    labels: tuple[str, ...]
    least: int
    """Smallest answer so far."""


def lookup_id_of(lookup_id: bytes, stage: int) -> bytes:
    """Return the id under which a lookup is known to the ranks of one pipeline stage.

    Stages have namespaces of their own, and a server takes no id twice.
    """
    return lookup_id[:-2] + (int.from_bytes(lookup_id[-2:]) ^ stage).to_bytes(2)


def scheduler_over(members: Sequence[Member], config: ClientConfig) -> "SchedulerAdapter | GroupScheduler":
    """Return the adapter for these servers; the plain one if there is only one."""
    return SchedulerAdapter(members[0].link, config) if len(members) == 1 else GroupScheduler(members, config)


class GroupScheduler:
    """A ``SchedulerAdapter`` over several servers. One thread (the scheduler's) calls it; no call waits."""

    def __init__(self, members: Sequence[Member], config: ClientConfig) -> None:
        """Make it.

        Raises:
            ValueError: two members have one label.
        """
        self._members = {member.label: member for member in members}
        self._adapters = {member.label: SchedulerAdapter(member.link, config) for member in members}
        if len(self._members) != len(members):
            raise ValueError(f"{len(members)} servers have the names {list(self._members)}")
        self._asked: dict[str, _Asked] = {}
        self._counts: Counter[str] = Counter()

    def lookup(self, request_id: str, digests: bytes, shards: tuple[int, ...]) -> None:
        """Ask every server for its part of *shards*, as ``SchedulerAdapter.lookup`` does; none while one is away."""
        known = self._asked.get(request_id)
        if known is not None and (known.digests, known.shards) == (digests, shards):
            return
        parts = {label: self._part(member, shards) for label, member in self._members.items()}
        parts = {label: part for label, part in parts.items() if part}
        if known is not None:
            self.release(request_id)
        self._counts["group_lookups"] += 1
        if not self._complete(parts, shards):
            self._counts["group_lookups_not_asked"] += 1
            self._remember(request_id, _Asked(b"", digests, shards, (), 0))
            return
        lookup_id = os.urandom(16)
        for label, part in parts.items():
            self._adapters[label].lookup(request_id, digests, part, lookup_id_of(lookup_id, self._members[label].stage))
        self._remember(request_id, _Asked(lookup_id, digests, shards, tuple(parts), _UNKNOWN))

    def answer(self, request_id: str) -> Answer | None:
        """Return the smallest answer of all servers, or None while it is not known.

        A server's zero decides at once. What a server pinned beyond the smallest answer so far is freed as soon as that
        is known, and chunks that are still coming beyond it are not waited for.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            return _MISS
        while True:
            answers = [self._adapters[label].answer(request_id) for label in asked.labels]
            least = min((answer.chunks for answer in answers if answer is not None), default=asked.least)
            if least >= asked.least:
                break
            asked.least = least
            for label in asked.labels:
                self._counts["surplus_chunks"] += self._adapters[label].limit(request_id, least)
        if not asked.least:
            return _MISS
        return None if None in answers else Answer(asked.least, asked.lookup_id)

    def free(self, request_id: str, first: int, end: int) -> None:
        """Unpin chunks [first, end) of the request's lookup at all servers."""
        for adapter in self._adapters.values():
            adapter.free(request_id, first, end)

    def release(self, request_id: str) -> None:
        """Forget the request's lookup and unpin all of it at all servers."""
        self._asked.pop(request_id, None)
        for adapter in self._adapters.values():
            adapter.release(request_id)

    def end(self, request_id: str) -> None:
        """The engine is done with the request; all servers hear it."""
        self._asked.pop(request_id, None)
        for adapter in self._adapters.values():
            adapter.end(request_id)

    def forget_failed(self, request_id: str) -> None:
        """A load of the request failed, at whatever server: until its end its lookups are misses."""
        self._asked.pop(request_id, None)
        for adapter in self._adapters.values():
            adapter.forget_failed(request_id)

    def clear(self, model: str) -> tuple[Call[Cleared], ...]:
        """Ask all servers to drop all that they keep of a model, at once."""
        return tuple(chain.from_iterable(adapter.clear(model) for adapter in self._adapters.values()))

    def states(self) -> dict[str, LinkState]:
        """Return how each server stands, by its label."""
        return {label: member.link.state for label, member in self._members.items()}

    def counters(self) -> dict[str, float]:
        """Return the sum of the servers' counters and those of the group, since the start."""
        total = Counter({name: float(value) for name, value in self._counts.items()})
        for adapter in self._adapters.values():
            total.update(adapter.counters())
        return dict(total)

    @staticmethod
    def _part(member: Member, shards: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shard for shard in member.shards if shard in shards)

    def _complete(self, parts: dict[str, tuple[int, ...]], shards: tuple[int, ...]) -> bool:
        """True if everybody who holds a part can be asked, for every shard."""
        healthy = all(self._members[label].link.state.healthy for label in parts)
        return healthy and {shard for part in parts.values() for shard in part} == set(shards)

    def _remember(self, request_id: str, asked: _Asked) -> None:
        self._asked[request_id] = asked
        while len(self._asked) > _REQUESTS:
            self.release(next(iter(self._asked)))
