# SPDX-License-Identifier: Apache-2.0
"""The request loop: the one thread that owns sockets, engine and connections.

A turn takes what waits, serves short requests before long ones and control before bulk, runs what other threads left,
then what time brings. Long requests have a share of each turn: what is left of them waits for the next one, which first
looks who else has come. Nothing in it waits for anything but the next thing to do.
"""

from collections.abc import Callable
from typing import Final, Protocol

from kvpool.server.backlog import Backlog, Waiting
from kvpool.server.bulk import BulkVerbs
from kvpool.server.caching import CachingVerbs
from kvpool.server.calls import Call
from kvpool.server.descriptors import DescriptorServer
from kvpool.server.dispatch import Dispatcher
from kvpool.server.inbox import Inbox
from kvpool.server.parts import Parts
from kvpool.server.sockets import Arrival, Origin

__all__ = ["Door", "Loop"]

_ORIGINS: Final = tuple(Origin)
_TURN_MESSAGES: Final = 64
"""Taken from each socket in one turn: a flood delays others by this many requests, not more."""
_LONG_S: Final = 0.0003
"""What long requests of one kind may take of one turn, beyond the first of them."""
_BACKLOG: Final = 256
"""With so many requests waiting here, others wait with their senders."""
_HOUSEKEEPING_S: Final = 0.5
_PUBLISH_S: Final = 1.0


class Door(Protocol):
    """The part of the frontend that is needed here; see ``kvpool.server.sockets.Frontend``."""

    def wait(self, timeout_s: float) -> set[Origin | int]:
        """Return what is readable."""

    def receive(self, origin: Origin, most: int) -> list[Arrival]:
        """Return messages that wait; never blocks."""


class Loop:
    """Runs the server.

    Args:
        door: the sockets; the inbox and the descriptor server are watched by it already.
        dispatcher: sealed.
        parts: the server's parts.
        caching: has parked calls.
        bulk: knows how many copies run.
        inbox: what other threads leave.
        publish: called about once a second.
    """

    def __init__(
        self,
        door: Door,
        dispatcher: Dispatcher,
        parts: Parts,
        verbs: tuple[CachingVerbs, BulkVerbs],
        inbox: Inbox,
        publish: Callable[[], object],
    ) -> None:
        self._door = door
        self._dispatcher = dispatcher
        self._parts = parts
        self._caching, self._bulk = verbs
        self._inbox = inbox
        self._publish = publish
        self._backlog = Backlog(parts.connections.is_bulk)
        self._descriptors: DescriptorServer | None = None
        self._followed: dict[int, Callable[[], None]] = {}
        silent_s = parts.config.leases.client_silent_s
        self._housekeeping_s = min(_HOUSEKEEPING_S, silent_s / 4)
        self._next_housekeeping_s = self._next_publish_s = parts.clock()
        self._drain_until_s: float | None = None
        self._engine_due_s: float | None = None
        """When the engine had something to do next, as of the turn's beginning."""
        self._stopped = False
        self.lanes_work = True
        """False while a copy takes far too long."""

    def follow(self, fd: int, turn: Callable[[], None]) -> None:
        """Call *turn* whenever *fd*, which the door watches already, is readable."""
        self._followed[fd] = turn

    def watch(self, descriptors: DescriptorServer) -> None:
        """Serve the descriptor socket, too."""
        self._descriptors = descriptors

    def run(self) -> None:
        """Serve until drained or stopped. What it raises is a defect: the server must end, not go on half dead."""
        while not self._stopped:
            self.turn()

    def drain(self) -> None:
        """Take no new work; end once that under way is done, at the latest after ``drain_s``. On the loop's thread."""
        if self._drain_until_s is None:
            self._dispatcher.draining = True
            self._drain_until_s = self._parts.clock() + self._parts.config.drain_s
            self._publish()

    def stop(self) -> None:
        """End after this turn. On the loop's thread."""
        self._stopped = True

    def turn(self) -> None:
        """Wait for something to do, and do all of it."""
        ready = self._door.wait(self._timeout_s())
        received_s = self._parts.clock()
        if self._inbox.fileno() in ready:
            for item in self._inbox.take():
                item()
        self._serve(ready, received_s)
        if self._descriptors is not None and self._descriptors.fileno() in ready:
            self._descriptors.turn(received_s)
        for fd, turn in self._followed.items():
            if fd in ready:
                turn()
        if self._parts.rings.due(ready, self._parts.clock()):
            self._parts.rings.turn(self._parts.clock())
        self._time_passes(self._parts.clock())
        self._caching.resolve()
        self._check_drained()

    def _serve(self, ready: set[Origin | int], received_s: float) -> None:
        """Serve what came: what takes no time first, then for a while what does."""
        if len(self._backlog) < _BACKLOG:
            arrivals = [a for o in _ORIGINS if o in ready for a in self._door.receive(o, _TURN_MESSAGES)]
            for arrival in self._backlog.sort(arrivals, received_s):
                self._answer(Waiting(arrival, received_s))
        for take in (self._backlog.control, self._backlog.bulk):
            ends_s = self._parts.clock() + _LONG_S
            while (waiting := take()) is not None:
                self._answer(waiting)
                if self._parts.clock() >= ends_s:
                    break

    def _answer(self, waiting: Waiting) -> None:
        parts, arrival = self._parts, waiting.arrival
        call = Call(arrival.peer, waiting.received_s)
        answer = self._dispatcher.answer(call, arrival, parts.clock())
        if answer is not None:
            parts.answers.finish(call, answer, parts.clock())

    def _time_passes(self, now_s: float) -> None:
        parts = self._parts
        self._caching.expire(now_s)
        parts.answers.expire(now_s)
        due_s = self._engine_due_s
        if now_s >= self._next_housekeeping_s:
            self._keep_house(now_s)
        elif due_s is not None and now_s >= due_s:
            parts.engine.tick(now_s)
        if now_s >= self._next_publish_s:
            self._next_publish_s = now_s + _PUBLISH_S
            self._publish()

    def _keep_house(self, now_s: float) -> None:
        parts = self._parts
        self._next_housekeeping_s = now_s + self._housekeeping_s
        parts.engine.tick(now_s)
        parts.rings.keep_house(now_s)
        self.lanes_work = parts.lanes.check(now_s)
        for client in parts.connections.silent(now_s):
            parts.lose(client, "silent")
        if self._descriptors is not None:
            self._descriptors.expire(now_s)

    def _timeout_s(self) -> float:
        self._engine_due_s = self._parts.engine.next_deadline_s()
        if self._backlog:
            return 0.0
        times = (
            self._next_housekeeping_s,
            self._next_publish_s,
            self._drain_until_s,
            self._engine_due_s,
            self._parts.answers.next_deadline_s(),
            self._caching.next_deadline_s(),
            self._parts.rings.next_deadline_s(self._parts.clock()),
        )
        return max(min(t for t in times if t is not None) - self._parts.clock(), 0.0)

    def _check_drained(self) -> None:
        if self._drain_until_s is None:
            return
        # Who waits for news of a ring waits for no work.
        waiting = self._parts.answers.waiting - self._parts.rings.watching
        idle = not (waiting or self._backlog or self._bulk.running or self._parts.engine.numbers().leases)
        if idle or self._parts.clock() >= self._drain_until_s:
            self._stopped = True
