# SPDX-License-Identifier: Apache-2.0
"""A bare DEALER that sends what a test says, well formed or not."""

import itertools
import os

import zmq

from kvpool.model.errors import CacheError
from kvpool.model.identity import ClientKind, GroupKind, GroupSpec, Mode, Namespace
from kvpool.model.keys import self_test
from kvpool.wire import codec
from kvpool.wire import messages as m
from kvpool.wire.versions import VERSION_MAX, VERSION_MIN

WAIT_MS = 5000
NAMESPACE = Namespace(
    model="tiny", model_fingerprint="f", dtype="bf16", kv_dtype="bf16", layout="l", hash_algorithm="blake3-chain-2"
)


class RawClient:
    """One connection. ``ask`` returns (reply, frames); ``refusal`` the error that a request gets."""

    def __init__(self, address, *, server_key=b"", routing_id=b""):
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if routing_id:
            self.socket.routing_id = routing_id
        if server_key:
            public, secret = zmq.curve_keypair()
            self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
            self.socket.curve_serverkey = server_key
        self.socket.connect(address)
        self._numbers = itertools.count(1)
        self.client_id = os.urandom(16)
        self.envelope = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.socket.close()
        self._context.term()

    def send(self, request, *frames, deadline_ms=WAIT_MS, version=VERSION_MAX):
        """Send one request; returns its number."""
        number = next(self._numbers)
        head = codec.encode_request(m.Envelope(version, number, deadline_ms), request)
        self.socket.send_multipart([*head, *frames], copy=False)
        return number

    def receive(self, wait_ms=WAIT_MS):
        """Return (envelope, reply, frames) of the next reply; None if none comes."""
        if not self.socket.poll(wait_ms):
            return None
        frames = self.socket.recv_multipart()
        envelope, reply = codec.decode_reply(frames)
        return envelope, reply, frames[2:]

    def ask(self, request, *frames, **options):
        """Send one request and return its reply and the reply's raw frames."""
        number = self.send(request, *frames, **options)
        got = self.receive()
        assert got is not None, f"no answer to {type(request).__name__}"
        self.envelope, reply, raw = got
        assert self.envelope.request_id == number
        return reply, raw

    def refusal(self, request, *frames, **options):
        """Send one request that must be refused; returns the error."""
        reply, _ = self.ask(request, *frames, **options)
        assert isinstance(reply, m.Failed), reply
        return codec.error_of(reply)

    def hello(self, **changes):
        values = {
            "version_min": VERSION_MIN,
            "version_max": VERSION_MAX,
            "kind": ClientKind.WORKER,
            "client_id": self.client_id,
            "self_test": self_test(),
        }
        return m.Hello(**(values | changes))

    def welcome(self, **changes):
        """Say Hello and return the Welcome."""
        reply, _ = self.ask(self.hello(**changes))
        assert isinstance(reply, m.Welcome), reply
        return reply

    def register(self, shard_bytes=8192, *, modes=(Mode.STREAMED,), shards=(0,), namespace=NAMESPACE):
        """Register one group and return the Registered."""
        groups = (GroupSpec(kind=GroupKind.FULL, shard_bytes=shard_bytes),)
        reply, _ = self.ask(m.Register(namespace=namespace, groups=groups, shards=shards, modes=modes))
        assert isinstance(reply, m.Registered), reply
        return reply


def error_code(reply):
    """Return the code of a Failed reply."""
    assert isinstance(reply, m.Failed), reply
    assert issubclass(type(codec.error_of(reply)), CacheError)
    return reply.code
