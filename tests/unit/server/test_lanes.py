# SPDX-License-Identifier: Apache-2.0
"""Copies in lanes: order, cut-offs, death."""

import threading
from queue import SimpleQueue

import pytest
from tests.unit.server.test_connections import A

from kvpool.server.calls import Call
from kvpool.server.lanes import Copy, LaneDiedError, Lanes

END_S = 5

SIZE = 3


class Loop:
    """Collects what lanes post."""

    def __init__(self):
        self._posts = SimpleQueue()
        self.ended = []

    def post(self, item):
        self._posts.put(item)

    def run(self, count):
        while len(self.ended) < count:
            self._posts.get(timeout=END_S)()


@pytest.fixture
def loop():
    return Loop()


@pytest.fixture
def lanes(loop):
    made = Lanes(2, loop.post, lambda: 0.0)
    made.start()
    yield made
    assert made.close(END_S)


def copy(loop, source, target, ended=False):
    call = Call(A, 0.0)
    call.ended = ended
    return Copy(call, source, target, SIZE if target is None else len(target), loop.ended.append)


@pytest.mark.behaviour("R065", "R080")
def test_copies_of_one_lane_end_in_their_order(lanes, loop):
    targets = [bytearray(100_000) for _ in range(20)]
    copies = [copy(loop, bytes([n]) * 100_000, target) for n, target in enumerate(targets)]
    for c in copies:
        lanes.submit(0, c)
    loop.run(20)

    assert loop.ended == copies
    assert all(target == bytes([n]) * 100_000 for n, target in enumerate(targets))


def test_what_was_read_belongs_to_the_reply(lanes, loop):
    lanes.submit(1, one := copy(loop, lambda: b"abc", None))
    loop.run(1)

    assert one.ok
    assert bytes(one.target) == b"abc"


def test_a_short_read_is_no_copy(lanes, loop):
    lanes.submit(1, one := copy(loop, lambda: b"ab", None))
    loop.run(1)

    assert not one.ok


def test_what_nobody_waits_for_is_not_copied(lanes, loop):
    target = bytearray(3)
    lanes.submit(0, one := copy(loop, b"abc", target, ended=True))
    loop.run(1)

    assert not one.ok
    assert target == bytes(3)


def test_clients_are_spread_over_the_lanes(lanes):
    chosen = [lanes.join() for _ in range(4)]
    lanes.leave(0)

    assert sorted(chosen) == [0, 0, 1, 1]
    assert lanes.join() == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lane_that_dies_is_noticed(lanes, loop):
    lanes.submit(0, copy(loop, b"four", bytearray(3)))
    lane = next(t for t in threading.enumerate() if t.name == "lane-0")
    lane.join(END_S)

    with pytest.raises(LaneDiedError):
        lanes.check(0.0)


def test_a_copy_that_does_not_end_is_noticed(loop):
    begun, go = threading.Event(), threading.Event()
    lanes = Lanes(1, loop.post, lambda: 0.0)
    lanes.start()
    lanes.submit(0, Stuck(begun, go, loop))
    assert begun.wait(END_S)

    assert lanes.check(4.9)
    assert not lanes.check(5.1)
    go.set()
    loop.run(1)
    assert lanes.check(5.1)
    assert lanes.close(END_S)


class Stuck:
    """A copy that takes until it is told to end."""

    def __init__(self, begun, go, loop):
        self.run = lambda: (begun.set(), go.wait(END_S))
        self.done = loop.ended.append
