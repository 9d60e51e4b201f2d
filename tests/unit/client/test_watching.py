# SPDX-License-Identifier: Apache-2.0
"""Following a server's cache: what was passed on adds up to what it keeps, over lost sessions and restarts."""

from random import Random
from types import SimpleNamespace

import pytest

from kvpool.client.call import Call
from kvpool.client.watching import PAUSE_S, Watcher
from kvpool.model.errors import DeadlineExceeded, ServerUnavailable
from kvpool.wire.messages import Events


def digest(number: int) -> bytes:
    return number.to_bytes(32)


class ServerLike:
    """A link to a server that keeps a set of chunks and tells of it as the real one does."""

    def __init__(self):
        self.kept, self.log, self.first, self.page = set(), [], 1, 1000
        self.state = SimpleNamespace(healthy=True, epoch=1)
        self.pending, self.asked, self.rest = [], 0, []

    def store(self, *numbers):
        for number in numbers:
            self.kept.add(number)
            self.log.append((number, 1))

    def evict(self, *numbers):
        for number in numbers:
            self.kept.discard(number)
            self.log.append((number, 0))

    def restart(self, *, keep):
        """Another run of the server, with another journal."""
        self.kept = {n for n in self.kept if n in keep}
        self.log, self.first, self.rest = [], 1, []
        self.state = SimpleNamespace(healthy=True, epoch=self.state.epoch + 1)
        for call in self.pending:
            call.fail(ServerUnavailable("gone"))
        self.pending = []

    def submit(self, request, *, epoch):
        assert epoch == self.state.epoch
        self.asked += 1
        call = Call(request, (), 0.0)
        self.pending.append(call)
        return call

    def answer(self):
        for call in self.pending:
            last = self.first + len(self.log)
            after = call.request.after
            if self.rest and after == self.rest[0]:
                at, numbers = self.rest
                self._page(call, at, numbers, begins=False)
            elif 1 <= after <= last:
                news = self.log[after - self.first :]
                self._finish(call, Events(sequence=last), news)
            else:
                self._page(call, last, sorted(self.kept), begins=True)
        self.pending = []

    def answer_too_late(self):
        """What is under way was answered, and nobody heard it."""
        late, self.pending = self.pending, [Call(call.request, (), 0.0) for call in self.pending]
        self.answer()
        for call in late:
            call.fail(DeadlineExceeded("no answer"))

    def _page(self, call, at, numbers, *, begins):
        page, rest = numbers[: self.page], numbers[self.page :]
        self.rest = [at, rest] if rest else []
        self._finish(call, Events(sequence=at, snapshot=begins, more=bool(rest)), [(n, 1) for n in page])

    @staticmethod
    def _finish(call, events, news):
        call.finish(events, (bytes(m for _, m in news), b"".join(digest(n) for n, _ in news)))


class Router:
    """What a listener makes of it all."""

    def __init__(self, watcher):
        self.watcher, self.index, self.now_s = watcher, set(), 0.0

    def poll(self):
        self.now_s += PAUSE_S
        change = self.watcher.poll(self.now_s)
        assert not set(change.removed) - self.index, "gone twice"
        self.index.difference_update(change.removed)
        assert not set(change.stored) & self.index, "told twice"
        self.index.update(change.stored)
        return change


@pytest.fixture
def server():
    return ServerLike()


@pytest.fixture
def router(server):
    return Router(Watcher(server))


def settle(router, server, turns=6):
    for _ in range(turns):
        router.poll()
        server.answer()
    router.poll()


def test_a_snapshot_then_events(router, server) -> None:
    server.store(1, 2)
    settle(router, server)
    assert router.index == {digest(1), digest(2)}

    server.evict(1)
    server.store(3)
    settle(router, server)
    assert router.index == {digest(2), digest(3)}


def test_it_asks_now_and_then_and_one_question_at_a_time(router, server) -> None:
    for _ in range(10):
        router.poll()
    assert server.asked == 1
    server.answer()
    router.poll()
    assert server.asked == 2
    server.answer()
    router.now_s -= PAUSE_S
    router.poll()
    assert server.asked == 2, "not before the pause is over"


def test_without_a_server_nothing_is_said(router, server) -> None:
    server.store(1)
    settle(router, server)
    server.state.healthy = False
    for call in server.pending:
        call.fail(ServerUnavailable("gone"))
    server.pending = []
    server.evict(1)
    settle(router, server)

    assert router.index == {digest(1)}, "it may come back with all that it kept"


@pytest.mark.behaviour("D120", "D122")
@pytest.mark.parametrize("asked", [True, False])
def test_after_a_restart_only_what_was_lost_is_taken_back(router, server, asked) -> None:
    """Whether it ends a question, or comes between two."""
    server.store(1, 2, 3)
    settle(router, server)
    if not asked:
        server.answer()
    server.restart(keep={2, 3})
    server.store(4, 5, 6, 7)  # its journal is longer by now than the former one was

    changes = []
    for _ in range(4):
        changes.append(router.poll())
        server.answer()

    assert next(c for c in changes if c.removed or c.stored).removed == (digest(1),)
    assert router.index == {digest(n) for n in (2, 3, 4, 5, 6, 7)}


def test_a_long_snapshot_counts_when_its_last_page_is_there(router, server) -> None:
    server.page = 2
    server.store(1, 2, 3, 4, 5)
    router.poll()
    server.answer()
    assert router.poll().stored == ()
    settle(router, server)
    assert router.index == {digest(n) for n in range(1, 6)}


@pytest.mark.behaviour("D122")
def test_a_page_that_got_lost_leaves_no_gap(router, server) -> None:
    server.page = 2
    server.store(1, 2, 3, 4, 5)
    router.poll()
    server.answer()
    router.poll()
    server.answer_too_late()

    settle(router, server)

    assert router.index == {digest(n) for n in range(1, 6)}


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_the_index_is_the_truth_in_the_end(router, server, seed) -> None:
    random = Random(seed)
    server.page = random.choice([2, 1000])
    for _ in range(200):
        choice = random.random()
        if choice < 0.3:
            server.store(random.randrange(20))
        elif choice < 0.5 and server.kept:
            server.evict(random.choice(sorted(server.kept)))
        elif choice < 0.53:
            server.restart(keep=set(random.sample(range(20), 10)))
        elif choice < 0.75:
            server.answer()
        else:
            router.poll()

    settle(router, server, 40)

    assert router.index == {digest(n) for n in server.kept}
