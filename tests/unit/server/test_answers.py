# SPDX-License-Identifier: Apache-2.0
"""Every request ends exactly once."""

import pytest
from tests.unit.server.test_connections import A, client

from kvpool.metrics.catalogue import series_key
from kvpool.metrics.numbers import Numbers
from kvpool.model.errors import Busy, Draining
from kvpool.server.answers import Answers
from kvpool.server.calls import Answer, Call
from kvpool.server.sockets import Sent
from kvpool.wire import codec
from kvpool.wire.messages import Pong

BOOT = b"b" * 16


class Sender:
    """Keeps what is sent; answers as told."""

    def __init__(self):
        self.sent = []
        self.becomes = Sent.SENT

    def send(self, peer, frames):
        envelope, reply = codec.decode_reply(frames)
        self.sent.append((peer, envelope.request_id, reply))
        return self.becomes


@pytest.fixture
def sender():
    return Sender()


@pytest.fixture
def numbers():
    return Numbers()


@pytest.fixture
def full():
    return []


@pytest.fixture
def answers(sender, numbers, full):
    return Answers(sender, BOOT, numbers, full.append)


def call(number=1, deadline_s=10.0, owner=None, tag="ping"):
    made = Call(A, 0.0)
    made.number, made.deadline_s, made.tag = number, deadline_s, tag
    made.client = owner or client()
    return made


def outcomes(sender):
    return [(number, getattr(reply, "code", "ok")) for _, number, reply in sender.sent]


def test_only_the_first_end_counts(answers, sender, numbers):
    one = call()
    answers.hold(one)
    answers.finish(one, Answer(Pong()), 1.0)
    answers.finish(one, Answer(Pong()), 1.0)
    answers.fail(one, Busy("late"), 1.0)
    answers.expire(100.0)

    assert outcomes(sender) == [(1, "ok")]
    assert answers.waiting == 0
    assert numbers.published()[series_key("kvpool_requests_total", request="ping", result="ok")] == 1


def test_deadlines_end_what_waits_in_their_order(answers, sender):
    for number, deadline_s in ((1, 3.0), (2, 1.0), (3, 2.0)):
        answers.hold(call(number, deadline_s))

    assert answers.next_deadline_s() == 1.0
    answers.expire(2.0)

    assert outcomes(sender) == [(2, "deadline_exceeded"), (3, "deadline_exceeded")]
    assert answers.next_deadline_s() == 3.0
    assert answers.waiting == 1


def test_an_answered_call_is_no_deadline_any_more(answers):
    answers.hold(one := call())
    answers.finish(one, Answer(Pong()), 1.0)

    assert answers.next_deadline_s() is None


def test_nobody_answers_a_client_that_is_gone(answers, sender):
    owner = client()
    calls = [call(n, owner=owner) for n in (1, 2)]
    for c in calls:
        answers.hold(c)
    answers.abandon(owner)
    answers.finish(calls[0], Answer(Pong()), 1.0)

    assert sender.sent == []
    assert answers.waiting == 0
    assert not owner.open


def test_all_that_waits_can_be_refused_at_once(answers, sender):
    for n in (1, 2, 3):
        answers.hold(call(n))

    answers.fail_all(Draining("end"), 1.0)

    assert outcomes(sender) == [(n, "draining") for n in (1, 2, 3)]
    assert answers.waiting == 0


def test_a_client_that_does_not_read_is_reported(answers, sender, full):
    sender.becomes = Sent.FULL
    answers.finish(one := call(), Answer(Pong()), 1.0)

    assert full == [one.client]


def test_a_connection_that_is_gone_is_no_news(answers, sender, full):
    sender.becomes = Sent.GONE
    answers.finish(call(), Answer(Pong()), 1.0)

    assert full == []


@pytest.mark.parametrize(
    ("error", "result"),
    [(Busy("x"), "retryable"), (codec.Malformed("x"), "refused"), (codec.CacheError("x"), "internal")],
)
def test_errors_are_counted_by_code_and_by_what_the_caller_can_do(answers, numbers, error, result):
    answers.fail(call(tag="lookup"), error, 1.0)

    values = numbers.published()
    assert values[series_key("kvpool_errors_total", code=error.code)] == 1
    assert values[series_key("kvpool_requests_total", request="lookup", result=result)] == 1
