# SPDX-License-Identifier: Apache-2.0
"""A client of another network namespace: TCP, encrypted, a shared secret, bytes streamed."""

import pytest
from tests.fakes.clients import FakeEngine, digests, until
from tests.fakes.server_process import ServerProcess

from kvpool.client.link import Link
from kvpool.config import ClientConfig
from kvpool.model.identity import ClientKind, Mode
from kvpool.model.reasons import UncachedReason
from kvpool.server.keys import make_key


@pytest.fixture(scope="module", params=[-1, 0], ids=["bulk-encrypted", "bulk-plain"])
def place(request, tmp_path_factory):
    """A server with a key and a secret: (address, public key, secret file)."""
    folder = tmp_path_factory.mktemp("server")
    public = make_key(str(folder / "key"))
    secret = folder / "secret"
    secret.write_text("a secret of this pool alone\n")
    secret.chmod(0o600)
    listen = {"socket_path": "", "tcp_host": "127.0.0.1", "tcp_port": 0, "curve_key_file": str(folder / "key")}
    listen["plain_bulk_port"] = request.param
    with ServerProcess(folder, listen=listen, auth={"kind": "secret", "secret_file": str(secret)}) as server:
        until(lambda: server.endpoints, 30)
        yield server.endpoints[0], public, str(secret)


@pytest.mark.timeout(60)
def test_chunks_are_streamed_over_tcp(place, request):
    address, public, secret = place
    with FakeEngine(address, server_key=public, secret_file=secret) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        keys = digests(3)

        engine.store(keys)

        assert engine.worker_link.state.mode is Mode.STREAMED
        assert bool(engine.worker_link.state.welcome.plain_bulk_port) is ("bulk-plain" in request.node.callspec.id)
        assert engine.load(engine.lookup(keys), 100) == frozenset()
        assert (engine.bytes_of(100, 3) == engine.bytes_of(0, 3)).all()


def test_the_servers_key_may_come_later(place, tmp_path):
    address, public, secret = place
    key = tmp_path / "server-key"
    config = ClientConfig(server=address, server_key_file=str(key), secret_file=secret, connect_s=0.5)
    link = Link(config, ClientKind.PROBE)
    link.start()
    try:
        early = until(lambda: link.state if link.state.reason is UncachedReason.UNREACHABLE else None)
        assert str(key) in early.detail

        key.write_text(f"{public}\n")

        assert link.wait_healthy(10)
    finally:
        link.close(0.2)


@pytest.fixture
def named(tmp_path):
    """Starts servers that say who they are, one after the other at the same address."""
    public = make_key(str(tmp_path / "key"))
    (tmp_path / "secret").write_text("a secret of this pool alone\n")
    listen = {"socket_path": "", "tcp_host": "127.0.0.1", "tcp_port": 0, "curve_key_file": str(tmp_path / "key")}
    auth = {"kind": "secret", "secret_file": str(tmp_path / "secret")}
    with ServerProcess(tmp_path, listen=listen, auth=auth) as server:
        server.kill()

        def start(server_id):
            server.kill()
            server.config["server_id"] = server_id
            server.start()
            until(lambda: server.endpoints, 30)
            server.config["listen"]["tcp_port"] = int(server.endpoints[0].rpartition(":")[2])
            return server.endpoints[0]

        yield start, {"server_key": public, "secret_file": str(tmp_path / "secret"), "connect_s": 0.5}


def test_the_server_of_an_id_is_the_one_that_says_so(named):
    start, config = named
    address = start("node-1")

    wrong = reason_of(server=f"{address}#node-2", **config)
    assert wrong.reason is UncachedReason.UNREACHABLE
    assert "none of the 1 servers" in wrong.detail

    link = Link(ClientConfig(server=f"{address}#node-2", **config), ClientKind.PROBE)
    link.start()
    try:
        start("node-2")
        assert link.wait_healthy(20)
        assert link.state.welcome.server_id == "node-2"
    finally:
        link.close(0.2)


def reason_of(**config):
    link = Link(ClientConfig(**({"connect_s": 0.5} | config)), ClientKind.PROBE)
    link.start()
    try:
        return until(lambda: link.state if link.state.reason is not UncachedReason.STARTING else None)
    finally:
        link.close(0.2)


def test_a_wrong_secret_is_an_identity_problem(place, tmp_path):
    address, public, _ = place
    wrong = tmp_path / "wrong"
    wrong.write_text("guessed")

    assert reason_of(server=address, server_key=public, secret_file=str(wrong)).reason is UncachedReason.IDENTITY


def test_another_servers_key_never_gets_through(place, tmp_path):
    address, _, secret = place
    stranger = make_key(str(tmp_path / "key"))

    state = reason_of(server=address, server_key=stranger, secret_file=secret)

    assert state.reason is UncachedReason.UNREACHABLE
    assert not state.welcome


def test_a_port_where_nobody_listens_costs_no_more_than_the_handshakes_deadline(place):
    _, public, secret = place

    state = reason_of(server="tcp://127.0.0.1:9", server_key=public, secret_file=secret)

    assert state.reason is UncachedReason.UNREACHABLE
