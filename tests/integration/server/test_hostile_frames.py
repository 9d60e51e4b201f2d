# SPDX-License-Identifier: Apache-2.0
"""Ten thousand broken messages over a real socket: each one is answered, and the server goes on."""

import os
import random

import msgspec
import pytest
import zmq
from tests.fakes.running_server import running_server

from kvpool.metrics.catalogue import series_key
from kvpool.wire import codec
from kvpool.wire import messages as m

MESSAGES = 10_000
SEED = 20_261
BATCH = 40


def nested(depth):
    return b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * depth + b"\xc0"


def whole(rng):
    """A well-formed request of some kind, as frames."""
    requests = [
        m.Ping(),
        m.Stats(),
        m.EndRequest(request_id="r" * rng.randint(1, 256)),
        m.Lookup(request_id="r", lookup_id=rng.randbytes(16)),
        m.FreeLookup(lookup_id=rng.randbytes(16), first=rng.getrandbits(63)),
        m.CommitRetrieve(lookup_id=rng.randbytes(16), first=rng.getrandbits(31), end=rng.getrandbits(62)),
        m.PrepareRetrieve(lookup_id=rng.randbytes(16), end=rng.getrandbits(62)),
        m.ReadChunk(lookup_id=rng.randbytes(16), chunk=rng.getrandbits(62), offset=rng.getrandbits(62), length=1),
        m.PrepareStore(request_id="r", store_id=rng.randbytes(16), first=rng.getrandbits(62)),
        m.AttachBulk(ticket=rng.randbytes(16)),
        m.Renew(credential="x" * rng.randint(0, 16384)),
    ]
    frames = codec.encode_request(m.Envelope(1, rng.getrandbits(31), 5000), rng.choice(requests))
    return [*frames, *(rng.randbytes(rng.choice((0, 1, 31, 32, 64))) for _ in range(rng.randint(0, 2)))]


def truncated(rng):
    frames = whole(rng)
    at = rng.randrange(len(frames))
    frames[at] = frames[at][: rng.randint(0, len(frames[at]))]
    return frames


def flipped(rng):
    frames = whole(rng)
    at = rng.randrange(2)
    data = bytearray(frames[at])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    frames[at] = bytes(data)
    return frames


def body(rng):
    """A readable envelope before a body that is none."""
    envelope = msgspec.msgpack.encode([1, rng.getrandbits(31), 5000])
    bodies = [
        rng.randbytes(rng.randint(0, 200)),
        b"\x81\xa4type\xa4\xff\xfe\xfd\xfc",  # a tag that is no UTF-8
        b"\x82\xa4type\xabend_request\xaarequest_id\xa3\xff\xfe\xfd",
        b"\x81\xa4type\xa5blend",
        b"\x81\xa4type\xcf" + b"\xff" * 8,
        b"\xdf\xff\xff\xff\xff",  # a map that claims 2^32 entries
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        nested(rng.choice((10, 1000, 60_000))),
        b"\x91" * rng.choice((10, 60_000)),
        bytes(rng.choice((65_537, 100_000))),
    ]
    return [envelope, rng.choice(bodies)]


def envelope(rng):
    """No readable envelope, or none at all."""
    heads = [b"", b"\xc0", b"\x90", b"\x92\x01\x01", rng.randbytes(rng.randint(0, 80)), bytes(70_000), nested(60_000)]
    return [rng.choice(heads), *(rng.randbytes(8) for _ in range(rng.randint(0, 3)))]


def crowd(rng):
    """Far too many frames."""
    head = codec.encode_request(m.Envelope(1, rng.getrandbits(31), 5000), m.Ping())
    return [*head, *(b"x" for _ in range(rng.choice((7, 50, 500))))]


KINDS = (whole, truncated, flipped, body, envelope, crowd)


def readable(frames):
    """The number in the envelope, or 0."""
    try:
        return codec.decode_envelope(frames).request_id if len(frames[0]) <= 64 else 0
    except codec.Malformed:
        return 0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("hostile")) as running:
        yield running


@pytest.mark.slow
@pytest.mark.behaviour("D007", "D042")
@pytest.mark.parametrize("known", [False, True], ids=["stranger", "client"])
def test_every_broken_message_is_answered_and_ping_still_works(server, known):
    rng = random.Random(SEED + known)
    with server.connect() as c:
        if known:
            c.welcome()
            c.register()
        sent = 0
        while sent < MESSAGES // 2:
            batch = [rng.choice(KINDS)(rng) for _ in range(BATCH)]
            for frames in batch:
                c.socket.send_multipart(frames)
            answers = [c.receive() for _ in batch]
            assert None not in answers
            assert [a[0].request_id for a in answers] == [readable(frames) for frames in batch]
            sent += len(batch)

        c.welcome()
        assert isinstance(c.ask(m.Ping())[0], m.Pong)
    assert server.counter(series_key("kvpool_errors_total", code="internal")) == 0


@pytest.mark.behaviour("D036", "D042")
def test_a_frame_beyond_all_limits_ends_its_connection_alone(server):
    with server.connect() as sender, server.connect() as other:
        other.welcome()
        sender.welcome()
        sender.send(m.WriteChunk(store_id=bytes(16), chunk=0, offset=0), bytes(1 << 20))

        assert isinstance(other.ask(m.Ping())[0], m.Pong)
        # zmq hung up without a word; it connects again as somebody unknown.
        assert sender.refusal(m.Ping()).code == "not_registered"


@pytest.mark.behaviour("D042")
@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(4096), os.urandom(512)])
def test_what_speaks_no_zmq_does_no_harm(server, data):
    import socket

    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(server.config.listen.socket_path)
        raw.sendall(data)
        with server.connect() as c:
            assert c.welcome()


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.PUSH, zmq.SUB])
def test_other_socket_types_do_no_harm(server, kind):
    context = zmq.Context()
    stranger = context.socket(kind)
    stranger.linger = 0
    stranger.connect(server.address)
    if kind == zmq.REQ:
        stranger.send_multipart([b"a", b"b"])
    with server.connect() as c:
        assert c.welcome()
    stranger.close()
    context.term()
