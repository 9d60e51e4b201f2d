# SPDX-License-Identifier: Apache-2.0
"""Turns of the loop over a scripted door: what is served first, and what time brings."""

from types import SimpleNamespace

import pytest
from tests.unit.server.test_connections import A, B, C, client

from kvpool.config import LeaseConfig, LimitConfig, ServerConfig
from kvpool.engine.outcomes import FoundPrefix
from kvpool.metrics.catalogue import series_key
from kvpool.metrics.numbers import Numbers
from kvpool.model.errors import UnknownLease
from kvpool.model.reasons import LookupReason
from kvpool.server.answers import Answers
from kvpool.server.bulk import BulkVerbs
from kvpool.server.caching import CachingVerbs
from kvpool.server.calls import Answer
from kvpool.server.connections import Connections
from kvpool.server.dispatch import Dispatcher, Place, Route
from kvpool.server.inbox import Inbox
from kvpool.server.lanes import LaneDiedError
from kvpool.server.loop import Loop
from kvpool.server.movers import Movers
from kvpool.server.parts import Parts
from kvpool.server.rings import Rings
from kvpool.server.sockets import Arrival, Origin, Sent
from kvpool.wire import codec
from kvpool.wire import messages as m

LOOKUP = b"l" * 16


class ScriptedDoor:
    """What arrives is what the test queued; what is sent is kept."""

    def __init__(self):
        self.queue = []
        self.sent = []
        self.waited_s = []
        self.becomes = Sent.SENT
        self.watched = -1

    def wait(self, timeout_s):
        self.waited_s.append(timeout_s)
        return {Origin.UNIX, self.watched} if self.queue else {self.watched}

    def receive(self, _origin, most):
        taken, self.queue = self.queue[:most], self.queue[most:]
        return taken

    def send(self, _peer, frames):
        envelope, reply = codec.decode_reply(frames)
        self.sent.append((envelope.request_id, reply))
        return self.becomes

    def arrive(self, peer, request, number=0, deadline_ms=60_000, frames=()):
        head = codec.encode_request(m.Envelope(1, number, deadline_ms), request)
        self.queue.append(Arrival(peer, [memoryview(f) for f in (*head, *frames)]))


class ScriptedEngine:
    """Says what the test told it to; keeps what it was told."""

    def __init__(self):
        self.status = FoundPrefix(1, 1, LookupReason.MISSING)
        self.resolved = []
        self.lost = []
        self.ticks = []
        self.due_s = None
        self.leases = 0
        self.takes = lambda: None

    def lookup(self, *_):
        self.takes()
        return FoundPrefix(1, 0, LookupReason.ALL)

    def lookup_status(self, *_):
        if isinstance(self.status, Exception):
            raise self.status
        return self.status

    def take_resolved(self):
        taken, self.resolved = self.resolved, []
        return taken

    def client_lost(self, client_id, _now_s, *, proven_dead):
        self.lost.append((client_id, proven_dead))

    def tick(self, now_s):
        self.ticks.append(now_s)

    def next_deadline_s(self):
        return self.due_s

    def numbers(self):
        return SimpleNamespace(leases=self.leases)


class ScriptedLanes:
    """Lanes without threads."""

    def __init__(self):
        self.failure = None
        self.well = True

    def leave(self, lane):
        """Nothing to count."""

    def check(self, _now_s):
        if self.failure:
            raise self.failure
        return self.well


class World:
    """A loop with everything around it scripted."""

    def __init__(self):
        self.now_s = 0.0
        self.door, self.engine, self.lanes = ScriptedDoor(), ScriptedEngine(), ScriptedLanes()
        self.inbox = Inbox()
        self.door.watched = self.inbox.fileno()
        self.published = []
        config = ServerConfig(leases=LeaseConfig(heartbeat_s=1, client_silent_s=4), drain_s=3, limits=LimitConfig())
        numbers = Numbers()
        self.numbers = numbers
        self.parts = Parts(
            config=config,
            authenticator=None,
            engine=self.engine,
            connections=Connections(8, config.leases.client_silent_s),
            answers=Answers(self.door, b"b" * 16, numbers, lambda _: None),
            lanes=self.lanes,
            numbers=numbers,
            rings=Rings(Movers(lambda _: (-1, 0)), None, None, numbers, lambda: self.now_s),
            clock=lambda: self.now_s,
        )
        self.dispatcher = Dispatcher(self.parts.connections, config.limits, numbers)
        self.caching = CachingVerbs(self.parts)
        self.caching.add_to(self.dispatcher)
        self.dispatcher.add(m.Ping, Route(handler=lambda *_: Answer(m.Pong()), place=Place.ANY))
        self.loop = Loop(
            self.door,
            self.dispatcher,
            self.parts,
            (self.caching, BulkVerbs(self.parts)),
            self.inbox,
            lambda: self.published.append(self.now_s),
        )

    def turn(self, at_s=None):
        self.now_s = self.now_s if at_s is None else at_s
        self.loop.turn()

    def outcomes(self):
        return [(n, getattr(r, "code", None) or getattr(r, "coming", "ok")) for n, r in self.door.sent]


@pytest.fixture
def world():
    made = World()
    made.parts.connections.add(one := client())
    made.parts.connections.attach(one, B)
    made.parts.connections.add(client(b"2", C))
    yield made
    made.inbox.close()


@pytest.mark.behaviour("R065", "D032", "D048")
def test_control_is_served_before_bulk_whatever_came_first(world):
    for number, peer in enumerate((B, B, A, B, C)):
        world.door.arrive(peer, m.Ping(), number)
    world.turn()

    assert [n for n, _ in world.door.sent] == [2, 4, 0, 1, 3]


def lookup_arrives(world, peer, number):
    world.door.arrive(peer, m.Lookup(request_id="r", lookup_id=LOOKUP), number, frames=(bytes(32),))


@pytest.mark.behaviour("R065", "D048")
def test_a_ping_passes_the_lookups_of_others_and_none_of_its_own(world):
    lookup_arrives(world, A, 0)
    lookup_arrives(world, A, 1)
    world.door.arrive(A, m.Ping(), 2)
    world.door.arrive(C, m.Ping(), 3)
    world.turn()

    assert [n for n, _ in world.door.sent] == [3, 0, 1, 2]


@pytest.mark.behaviour("R065", "D048")
def test_lookups_have_a_share_of_a_turn_so_that_a_ping_waits_for_few_of_them(world):
    world.engine.takes = lambda: setattr(world, "now_s", world.now_s + 0.0002)
    for number in range(6):
        lookup_arrives(world, A, number)
    world.turn()
    world.door.arrive(C, m.Ping(), 6)
    for _ in range(3):
        world.turn()

    assert [n for n, _ in world.door.sent] == [0, 1, 6, 2, 3, 4, 5]
    assert world.door.waited_s[1:3] == [0.0, 0.0], "what waits here is not slept on"


def test_what_waits_for_its_turn_is_answered_before_a_drain_ends(world):
    world.engine.takes = lambda: setattr(world, "now_s", world.now_s + 0.01)
    for number in range(5):
        lookup_arrives(world, A, number)
    world.turn()
    world.inbox.post(world.loop.drain)
    world.loop.run()

    assert [n for n, _ in world.door.sent] == list(range(5))


@pytest.mark.behaviour("D124")
def test_a_flood_is_served_in_turns_so_that_time_and_others_get_theirs(world):
    for number in range(1000):
        world.door.arrive(A, m.Ping(), number)
    world.turn()
    first = len(world.door.sent)
    for _ in range(100):
        world.turn()

    assert 0 < first < 1000
    assert [n for n, _ in world.door.sent] == list(range(1000))


@pytest.mark.behaviour("D110")
def test_a_long_poll_is_answered_when_its_lookup_is_final(world):
    world.door.arrive(A, m.LookupStatus(lookup_id=LOOKUP, wait_s=10), 1)
    world.turn()
    assert world.door.sent == []

    world.engine.resolved, world.engine.status = [LOOKUP], FoundPrefix(2, 1, LookupReason.MISSING)
    world.turn(1.0)
    assert world.door.sent == []
    world.engine.resolved, world.engine.status = [LOOKUP], FoundPrefix(3, 0, LookupReason.ALL)
    world.turn(2.0)

    assert world.outcomes() == [(1, 0)]
    assert world.door.sent[0][1].chunks == 3


def test_a_long_poll_that_waited_long_enough_is_answered_with_how_things_stand(world):
    world.door.arrive(A, m.LookupStatus(lookup_id=LOOKUP, wait_s=2), 1)
    world.turn()
    world.turn(1.9)
    assert world.door.sent == []
    world.turn(2.0)
    world.turn(3.0)

    assert world.outcomes() == [(1, 1)]


def test_a_long_poll_whose_deadline_comes_first_is_answered_there(world):
    world.door.arrive(A, m.LookupStatus(lookup_id=LOOKUP, wait_s=20), 1, deadline_ms=1000)
    world.turn()
    world.turn(1.0)

    assert len(world.door.sent) == 1
    assert world.parts.answers.waiting == 0


def test_a_long_poll_whose_lookup_ended_gets_the_error(world):
    world.door.arrive(A, m.LookupStatus(lookup_id=LOOKUP, wait_s=20), 1)
    world.turn()
    world.engine.resolved, world.engine.status = [LOOKUP], UnknownLease("gone")
    world.turn()

    assert world.outcomes() == [(1, "unknown_lease")]


def test_a_status_without_waiting_is_answered_at_once(world):
    world.door.arrive(A, m.LookupStatus(lookup_id=LOOKUP), 1)
    world.turn()

    assert world.outcomes() == [(1, 1)]


def test_the_loop_sleeps_until_the_next_thing_is_due(world):
    world.turn()
    world.engine.due_s = world.now_s + 0.1
    world.turn()
    assert world.door.waited_s[-1] == pytest.approx(0.1)

    world.door.arrive(A, m.LookupStatus(lookup_id=LOOKUP, wait_s=0.05), 1)
    world.turn()
    world.turn()
    assert world.door.waited_s[-1] == pytest.approx(0.05)


def test_the_engine_ticks_when_it_said_so(world):
    world.turn()
    world.engine.ticks.clear()
    world.engine.due_s = 0.2
    world.turn(0.1)
    assert world.engine.ticks == []
    world.turn(0.2)

    assert world.engine.ticks == [0.2]


def test_silent_clients_are_lost_and_their_waiting_calls_with_them(world):
    world.door.arrive(A, m.LookupStatus(lookup_id=LOOKUP, wait_s=50), 1)
    world.turn(0.0)
    for tenth in range(1, 60):
        if tenth % 10 == 0:
            world.door.arrive(C, m.Ping(), 100 + tenth)
        world.turn(tenth / 10)

    assert world.engine.lost == [(b"1" * 16, False)]
    assert world.parts.answers.waiting == 0
    assert world.numbers.published()[series_key("kvpool_dropped_clients_total", cause="silent")] == 1
    assert all(n != 1 for n, _ in world.door.sent)


def test_what_other_threads_left_is_run(world):
    ran = []
    world.inbox.post(lambda: ran.append(1))
    world.turn()

    assert ran == [1]


def test_a_dead_lane_ends_the_loop(world):
    world.lanes.failure = LaneDiedError("gone")

    with pytest.raises(LaneDiedError):
        world.loop.run()


def test_a_stuck_lane_is_told(world):
    world.lanes.well = False
    world.turn(1.0)

    assert not world.loop.lanes_work


def test_something_is_published_each_second(world):
    for tenth in range(25):
        world.turn(tenth / 10)

    assert world.published == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("leases", "ends_s"), [(0, 0.0), (1, 3.0)])
def test_a_drain_ends_when_nothing_is_under_way_or_when_its_time_is_over(world, leases, ends_s):
    world.engine.leases = leases
    world.inbox.post(world.loop.drain)
    steps = iter(range(100))
    wait = world.door.wait
    world.door.wait = lambda timeout_s: (setattr(world, "now_s", next(steps) / 2), wait(timeout_s))[1]
    world.loop.run()

    assert world.now_s == ends_s
