# SPDX-License-Identifier: Apache-2.0
"""Follows what one server keeps of this client's namespace; asked now and then, never waited for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool.client.call import Call
from kvpool.client.link import Link
from kvpool.model.errors import CacheError, Malformed
from kvpool.model.keys import DIGEST_BYTES, digest_list
from kvpool.wire.messages import Events, Subscribe

__all__ = ["Change", "Watcher"]

PAUSE_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Change:
    """What is news since the last poll; first what went, then what came."""

    removed: tuple[bytes, ...] = ()
    stored: tuple[bytes, ...] = ()


@dataclass(slots=True)
class _Story:
    """What was told of one session."""

    epoch: int = 0
    after: int = 0
    snapshot: set[bytes] | None = None
    """Pages that came of a snapshot whose last one did not yet."""


@dataclass(slots=True)
class Watcher:
    """One thread polls it. What it told adds up to what the server keeps, whatever restarts in between."""

    link: Link
    _told: set[bytes] = field(default_factory=set)
    _story: _Story = field(default_factory=_Story)
    _call: Call[Events] | None = None
    _due_s: float = 0.0

    def poll(self, now_s: float) -> Change:
        """Return what is new. Without a server nothing is: it may come back with all that it kept."""
        change = Change()
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            try:
                change = self._read(*call.result(), now_s)
            except CacheError:
                self._story = _Story()
        self._ask(now_s)
        return change

    def _ask(self, now_s: float) -> None:
        state = self.link.state
        if self._call is not None or now_s < self._due_s or not state.healthy:
            return
        if state.epoch != self._story.epoch:
            self._story = _Story(epoch=state.epoch)
        self._due_s = now_s + PAUSE_S
        self._call = self.link.submit(Subscribe(after=self._story.after), epoch=state.epoch)

    def _read(self, events: Events, frames: Sequence[bytes | bytearray | memoryview], now_s: float) -> Change:
        if len(frames) != 2 or len(frames[0]) * DIGEST_BYTES != len(frames[1]):  # noqa: PLR2004 - marks and digests
            raise Malformed("events are a byte and a digest for each chunk")
        marks, digests = bytes(frames[0]), digest_list(bytes(frames[1]))
        story = self._story
        story.after = events.sequence
        if events.more:
            self._due_s = now_s
        if events.snapshot:
            story.snapshot = set()
        if story.snapshot is None:
            return self._changed(dict(zip(digests, marks, strict=True)))
        story.snapshot.update(digests)
        if events.more:
            return Change()
        whole, story.snapshot = story.snapshot, None
        gone = tuple(self._told - whole)
        come = tuple(digest for digest in whole if digest not in self._told)
        self._told = whole
        return Change(gone, come)

    def _changed(self, last: dict[bytes, int]) -> Change:
        """Reduce entries to how each chunk stands after them."""
        come = tuple(digest for digest, is_there in last.items() if is_there and digest not in self._told)
        gone = tuple(digest for digest, is_there in last.items() if not is_there and digest in self._told)
        self._told.update(come)
        self._told.difference_update(gone)
        return Change(gone, come)
