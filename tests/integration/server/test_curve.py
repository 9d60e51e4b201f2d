# SPDX-License-Identifier: Apache-2.0
"""TCP is encrypted, and a plain bulk port is for bulk alone."""

import pytest
import zmq
from tests.fakes.raw_client import RawClient
from tests.fakes.running_server import running_server

from kvpool.config import AuthConfig, AuthKind, ListenConfig
from kvpool.model.errors import IdentityRefused
from kvpool.model.identity import Mode
from kvpool.server.keys import make_key
from kvpool.wire import messages as m

NEVER_MS = 300


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "curve"
    return str(path), make_key(str(path)).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory, key):
    folder = tmp_path_factory.mktemp("curve")
    secret = folder / "secret"
    secret.write_text("s3cret")
    listen = ListenConfig(
        socket_path=str(folder / "run" / "kvpool.sock"),
        tcp_host="127.0.0.1",
        tcp_port=0,
        plain_bulk_port=0,
        curve_key_file=key[0],
    )
    auth = AuthConfig(kind=AuthKind.SECRET, secret_file=str(secret), tenant="t")
    with running_server(folder, listen=listen, auth=auth) as running:
        yield running


def plain_bulk(server):
    return server.server.endpoints[2]


@pytest.mark.behaviour("D041")
def test_a_client_with_the_servers_key_is_served(server, key):
    with RawClient(server.tcp(), server_key=key[1]) as c:
        welcome = c.welcome(credential="s3cret")

        assert welcome.tenant == "t"
        assert welcome.descriptor_socket == ""
        assert c.register(4096, modes=(Mode.CLIENT_MOVED, Mode.STREAMED)).mode is Mode.STREAMED


@pytest.mark.behaviour("D041")
def test_another_servers_key_never_gets_through(server):
    stranger, _ = zmq.curve_keypair()
    with RawClient(server.tcp(), server_key=stranger) as c:
        c.send(c.hello(credential="s3cret"))

        assert c.receive(NEVER_MS) is None


@pytest.mark.behaviour("D041")
def test_a_plain_client_never_gets_through(server):
    with RawClient(server.tcp()) as c:
        c.send(c.hello(credential="s3cret"))

        assert c.receive(NEVER_MS) is None


@pytest.mark.parametrize("credential", ["", "wrong"])
def test_encryption_is_no_identity(server, key, credential):
    with RawClient(server.tcp(), server_key=key[1]) as c:
        assert isinstance(c.refusal(c.hello(credential=credential)), IdentityRefused)


def test_plain_bulk_port_takes_tickets_and_bytes_alone(server, key):
    with RawClient(server.tcp(), server_key=key[1]) as c, RawClient(plain_bulk(server)) as bulk:
        assert bulk.refusal(bulk.hello(credential="s3cret")).code == "malformed"
        assert bulk.refusal(m.Ping()).code == "not_registered"
        ticket = c.welcome(credential="s3cret").ticket
        c.register(4096)

        assert isinstance(bulk.ask(m.AttachBulk(ticket=ticket))[0], m.Attached)
        assert bulk.refusal(m.WriteChunk(store_id=bytes(16), chunk=0, offset=0), b"x").code == "unknown_lease"
        assert bulk.refusal(m.Stats()).code == "malformed"


def test_clients_of_one_server_share_chunks_over_all_endpoints(server, key):
    digests = b"d" * 32
    with RawClient(server.tcp(), server_key=key[1]) as far, server.connect() as near:
        far_bulk = RawClient(plain_bulk(server))
        far_bulk.send(m.AttachBulk(ticket=far.welcome(credential="s3cret").ticket))
        assert far_bulk.receive()
        far.register(4096)
        near.welcome(credential="s3cret")
        near.register(4096)
        far.ask(m.PrepareStore(request_id="r", store_id=bytes(16)), digests)
        far_bulk.ask(m.WriteChunk(store_id=bytes(16), chunk=0, offset=0), bytes(4096))
        far.ask(m.CommitStore(store_id=bytes(16)), b"\1", bytes(16))

        assert near.ask(m.Lookup(request_id="r", lookup_id=bytes(16)), digests)[0].chunks == 1
        far_bulk.close()
