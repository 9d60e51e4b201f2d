# SPDX-License-Identifier: Apache-2.0
"""Checks before a handler runs, and that nothing a handler does escapes."""

from typing import get_args

import msgspec
import pytest
from tests.unit.server.test_connections import A, B, client

from kvpool.config import LimitConfig
from kvpool.metrics.numbers import Numbers
from kvpool.model.errors import PoolFull
from kvpool.server.calls import Answer, Call
from kvpool.server.connections import Connections
from kvpool.server.dispatch import Dispatcher, Place, Route
from kvpool.server.sockets import Arrival, Origin, Peer
from kvpool.wire import codec
from kvpool.wire import messages as m

PLAIN = Peer(Origin.PLAIN_BULK, b"p")


@pytest.fixture
def connections():
    found = Connections(most=4, silent_s=4.0)
    found.add(one := client())
    found.attach(one, B)
    return found


@pytest.fixture
def dispatcher(connections):
    return Dispatcher(connections, LimitConfig(in_flight=2, chunks=2), Numbers())


def pong(_call, _request):
    return Answer(m.Pong())


def crash(_call, _request):
    raise ZeroDivisionError("secret detail")


def refuse(_call, _request):
    raise PoolFull("no room")


def run(dispatcher, peer=A, request=None, frames=(), now_s=0.0, deadline_ms=1000, **arrival):
    """Answer one request; returns "ok", "later" or the error's code."""
    head = codec.encode_request(m.Envelope(1, 5, deadline_ms), request or m.Ping())
    views = [memoryview(f) for f in (*head, *frames)]
    call = Call(peer, 0.0)
    answer = dispatcher.answer(call, Arrival(peer, views, **arrival), now_s)
    assert call.number == 5
    return "later" if answer is None else getattr(answer.reply, "code", "ok")


@pytest.mark.behaviour("R069")
def test_seal_names_the_requests_without_a_handler(dispatcher):
    for request in get_args(m.AnyRequest):
        if request not in (m.Lookup, m.Stats):
            dispatcher.add(request, Route(handler=pong))

    with pytest.raises(TypeError, match="no handler for Lookup, Stats"):
        dispatcher.seal()
    dispatcher.add(m.Lookup, Route(handler=pong))
    dispatcher.add(m.Stats, Route(handler=pong))
    dispatcher.seal()


@pytest.mark.behaviour("D007", "D046")
@pytest.mark.parametrize(
    ("handler", "code"), [(pong, "ok"), (refuse, "pool_full"), (crash, "internal"), (lambda _c, _r: None, "later")]
)
def test_whatever_a_handler_does_becomes_an_answer(dispatcher, handler, code):
    dispatcher.add(m.Ping, Route(handler=handler))

    assert run(dispatcher) == code


@pytest.mark.behaviour("D042")
@pytest.mark.parametrize(
    ("envelope", "body", "code"),
    [
        ([1, 5, 1000], bytes(64 << 10), "malformed"),
        ([1, 5, 1000], bytes((64 << 10) + 1), "limit_exceeded"),
        ([1, 5, 1000, "later"], b"\x81\xa4type\xa4ping", "ok"),
        ([1, 5, 1000, "x" * 64], b"\x81\xa4type\xa4ping", "malformed"),
    ],
    ids=["whatever a body holds", "a long body", "a field of a later version", "a long envelope"],
)
def test_long_heads_are_refused_before_they_are_decoded(dispatcher, envelope, body, code):
    dispatcher.add(m.Ping, Route(handler=pong))
    head = [memoryview(msgspec.msgpack.encode(envelope)), memoryview(body)]

    answer = dispatcher.answer(Call(A, 0.0), Arrival(A, head), 0.0)

    assert getattr(answer.reply, "code", "ok") == code


def test_the_detail_of_a_defect_stays_in_the_log(dispatcher):
    dispatcher.add(m.Ping, Route(handler=crash))
    head = [memoryview(f) for f in codec.encode_request(m.Envelope(1, 5, 1000), m.Ping())]

    answer = dispatcher.answer(Call(A, 0.0), Arrival(A, head), 0.0)

    assert "secret" not in answer.reply.detail


@pytest.mark.parametrize(
    ("route", "peer", "code"),
    [
        ({}, A, "ok"),
        ({}, B, "malformed"),
        ({"place": Place.BULK}, A, "malformed"),
        ({"place": Place.BULK}, B, "ok"),
        ({"place": Place.ANY}, A, "ok"),
        ({"place": Place.ANY}, B, "ok"),
        ({}, Peer(Origin.UNIX, b"stranger"), "not_registered"),
        ({"needs_hello": False}, Peer(Origin.UNIX, b"stranger"), "ok"),
        ({"needs_hello": False}, PLAIN, "malformed"),
        ({"needs_hello": False, "place": Place.BULK}, PLAIN, "ok"),
    ],
)
def test_who_may_ask_where(dispatcher, route, peer, code):
    dispatcher.add(m.Ping, Route(handler=pong, **route))

    assert run(dispatcher, peer) == code


@pytest.mark.parametrize(("route", "code"), [({}, "identity_expired"), ({"while_expired": True}, "ok")])
def test_an_identity_that_ran_out(dispatcher, connections, route, code):
    connections.find(b"1" * 16).expires_s = 0.5
    dispatcher.add(m.Ping, Route(handler=pong, **route))

    assert run(dispatcher, now_s=0.4) == "ok"
    assert run(dispatcher, now_s=0.5) == code


@pytest.mark.parametrize(("route", "code"), [({}, "ok"), ({"new_work": True}, "draining")])
def test_a_draining_server(dispatcher, route, code):
    dispatcher.draining = True
    dispatcher.add(m.Ping, Route(handler=pong, **route))

    assert run(dispatcher) == code


@pytest.mark.parametrize(("route", "code"), [({}, "deadline_exceeded"), ({"releases": True}, "ok")])
def test_a_request_that_is_late(dispatcher, route, code):
    dispatcher.add(m.Ping, Route(handler=pong, **route))

    assert run(dispatcher, now_s=0.999) == "ok"
    assert run(dispatcher, now_s=1.0) == code


@pytest.mark.behaviour("D036")
@pytest.mark.parametrize(("route", "code"), [({}, "busy"), ({"releases": True}, "ok")])
def test_too_many_requests_under_way(dispatcher, connections, route, code):
    dispatcher.add(m.Ping, Route(handler=pong, **route))
    one = connections.find(b"1" * 16)
    one.open.add(Call(A, 0.0))
    assert run(dispatcher) == "ok"
    one.open.add(Call(A, 0.0))

    assert run(dispatcher) == code


@pytest.mark.parametrize(
    ("frames", "surplus", "code"),
    [
        ([bytes(64)], 0, "ok"),
        ([], 0, "malformed"),
        ([bytes(32)] * 2, 0, "malformed"),
        ([bytes(32)], 3, "malformed"),
        ([bytes(65)], 0, "limit_exceeded"),
    ],
)
def test_raw_frames_are_counted_and_measured(dispatcher, frames, surplus, code):
    dispatcher.add(m.Ping, Route(handler=pong, frames=1))

    assert run(dispatcher, frames=frames, surplus=surplus) == code


def test_a_peer_that_chose_its_id_is_not_heard(dispatcher):
    dispatcher.add(m.Ping, Route(handler=pong))

    assert run(dispatcher, chose_its_id=True) == "malformed"
