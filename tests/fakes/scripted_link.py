# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002 - the link's signature
"""A link and its server in virtual time: answers come so many ticks later, and every pin is known."""

from dataclasses import replace

from tests.fakes.scripted_server import LIMITS

from kvpool.client.call import Call
from kvpool.client.state import LinkState
from kvpool.model.errors import DeadlineExceeded, ServerUnavailable, StaleBoot
from kvpool.model.identity import Role
from kvpool.model.reasons import UncachedReason
from kvpool.wire import messages as m

TICK_S = 0.05
WELCOME = m.Welcome(
    version=1,
    server_id="s",
    server_version="0",
    chunk_tokens=16,
    tenant="default",
    limits=LIMITS,
    heartbeat_s=1.0,
    lookup_lease_s=60.0,
    store_lease_s=60.0,
    ticket=b"t" * 16,
)


class ScriptedLink:
    """Holds ``held`` chunks of any prompt; ``coming`` more arrive at tick ``comes_at``."""

    role = Role.BOTH

    def __init__(self, held=0, *, delay=0, coming=0, comes_at=0):
        self.held, self.delay, self.coming, self.comes_at = held, delay, coming, comes_at
        self.state = LinkState(healthy=True, reason=None, epoch=1, welcome=WELCOME)
        self.sent = []
        self.pins: dict[bytes, set[int]] = {}
        self._expected: dict[bytes, set[int]] = {}
        self._parked: list[Call] = []
        self._on_the_way: list[tuple[int, Call]] = []
        self._replies: list[tuple[Call, m.Reply]] = []
        self.now = 0

    def of(self, request):
        return [r for r in self.sent if type(r) is request]

    def submit(self, request, frames=(), *, deadline_s=None, bulk=False, epoch=None):
        call = Call(request, frames, self.now * TICK_S + (deadline_s or 1.0))
        if not self.state.healthy:
            call.fail(ServerUnavailable("down"))
        elif epoch not in (None, self.state.epoch):
            call.fail(StaleBoot("another session"))
        else:
            self.sent.append(request)
            self._on_the_way.append((self.now + self.delay, call))
        return call

    def tick(self):
        """One step: what is due reaches the server in order, its answers and missed deadlines end calls."""
        if self.now >= self.comes_at:
            for lookup_id, chunks in self._expected.items():
                self.pins[lookup_id] |= chunks
                chunks.clear()
        while self._on_the_way and self._on_the_way[0][0] <= self.now:
            self._serve(self._on_the_way.pop(0)[1])
        still = []
        for call in self._parked:
            if self._expected.get(call.request.lookup_id):
                still.append(call)
            else:
                call.finish(self._found(call.request.lookup_id), ())
        self._parked = still
        for call in [*self._parked, *(call for _, call in self._on_the_way)]:
            if self.now * TICK_S >= call.deadline_s:
                call.fail(DeadlineExceeded("late"))
        self.now += 1

    def die(self):
        """The process is gone, with all pins and calls."""
        self.state = replace(self.state, healthy=False, reason=UncachedReason.UNREACHABLE)
        for call in [*self._parked, *(call for _, call in self._on_the_way)]:
            call.fail(ServerUnavailable("died"))
        self._parked, self._on_the_way = [], []
        self.pins, self._expected = {}, {}

    def restart(self):
        """Die and be back in another session."""
        self.die()
        self.state = LinkState(healthy=True, reason=None, epoch=self.state.epoch + 1, welcome=WELCOME)

    def pinned(self):
        return set().union(*self.pins.values())

    def _found(self, lookup_id):
        pinned = self.pins.get(lookup_id, ())
        return m.Found(chunks=len(pinned), coming=len(self._expected.get(lookup_id, ())), reason="missing")

    def _serve(self, call):
        request = call.request
        if isinstance(request, m.Lookup):
            asked = len(call.frames[0]) // 32 if call.frames else 1 << 30
            there = self.held + (self.coming if self.now >= self.comes_at else 0)
            self.pins[request.lookup_id] = set(range(min(asked, there)))
            self._expected[request.lookup_id] = set(range(there, min(asked, self.held + self.coming)))
            call.finish(self._found(request.lookup_id), ())
        elif isinstance(request, m.LookupStatus):
            self._parked.append(call)
        elif isinstance(request, m.FreeLookup):
            freed = set(range(request.first, min(request.end, 1 << 16)))
            for held in (self.pins, self._expected):
                held.get(request.lookup_id, set()).difference_update(freed)
            call.finish(m.Freed(chunks=0), ())
        elif isinstance(request, m.EndRequest):
            self.pins.clear()
            self._expected.clear()
            call.finish(m.Ended(leases=0), ())
