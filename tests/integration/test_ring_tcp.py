# SPDX-License-Identifier: Apache-2.0
"""Rings of clients that share no socket with the server: their movers listen on declared TCP ports."""

import socket
from contextlib import ExitStack

import pytest
from tests.fakes.clients import CHUNK_BYTES, digests, engines, until
from tests.fakes.ports import HOST, free_range
from tests.fakes.ring_engine import RingEngine
from tests.fakes.server_process import WITH_FAKE_MOVERS, ServerProcess

from kvpool.model.identity import Mode
from kvpool.server.keys import make_key
from kvpool.wire import messages as m

PATIENCE_S = 60.0
TARGET = 128
LOADED = 'kvpool_ring_bytes_total{direction="load"}'


@pytest.fixture
def ports():
    return range(first := free_range(2), first + 2)


@pytest.fixture
def new_engine(tmp_path, ports):
    """Makes engines of a server that is reached over TCP alone; each notes its movers' ports."""
    secret, key = tmp_path / "secret", tmp_path / "key"
    secret.write_text("a secret of this test alone\n")
    secret.chmod(0o600)
    public = make_key(str(key))
    listen = {"socket_path": "", "tcp_host": HOST, "tcp_port": 0, "curve_key_file": str(key)}
    auth = {"kind": "secret", "secret_file": str(secret)}
    mover = {"first_port": ports[0], "ports": len(ports)}

    with ServerProcess(tmp_path, program=WITH_FAKE_MOVERS, listen=listen, auth=auth, mover=mover) as server:
        until(lambda: server.endpoints, 30)

        def make(model="m"):
            engine = RingEngine(server.endpoints[0], model=model, server_key=public, secret_file=str(secret))
            engine.joined_at, join = [], engine.offer.join

            def noted(address, *arguments):
                engine.joined_at.append(int(address.rpartition(":")[2]))
                return join(address, *arguments)

            engine.offer.join = noted
            return engine

        yield make


def joined(engine):
    until(lambda: not engine.rings.reason and engine.rings.current(), PATIENCE_S)
    until(lambda: engine.scheduler_link.state.healthy, PATIENCE_S)


def test_each_client_meets_its_mover_on_a_declared_port(new_engine, ports):
    with engines(new_engine("a"), new_engine("b")) as both:
        for engine in both:
            joined(engine)
            engine.blocks.fill(1)
            keys = digests(3)
            engine.store(keys)
            assert engine.load(engine.lookup(keys), TARGET) == frozenset()
            assert (engine.bytes_of(TARGET, 3) == engine.bytes_of(0, 3)).all()

        moved = until(lambda: both[0].scheduler_link.call(m.Stats())[0].counters[LOADED], PATIENCE_S)
        assert moved in (3 * CHUNK_BYTES, 6 * CHUNK_BYTES)
        assert {engine.joined_at[-1] for engine in both} == set(ports)


def test_a_client_for_which_no_port_is_left_streams_and_says_why(new_engine, ports):
    with ExitStack() as taken:
        for port in ports:
            taken.enter_context(socket.create_server((HOST, port)))
        with new_engine() as engine:
            until(lambda: engine.worker_link.state.mode is Mode.STREAMED, PATIENCE_S)

            assert "in use" in engine.rings.reason
            until(lambda: engine.scheduler_link.state.healthy, PATIENCE_S)
            engine.blocks.fill(2)
            keys = digests(2)
            engine.store(keys)
            assert engine.load(engine.lookup(keys), TARGET) == frozenset()


def test_whoever_does_not_know_the_secret_is_turned_away(new_engine):
    with new_engine() as engine:
        joined(engine)
        with socket.create_connection((HOST, engine.joined_at[-1]), 5) as stranger:
            stranger.sendall(b"\0" * 64)
            assert stranger.recv(1) == b""

        engine.blocks.fill(3)
        keys = digests(2)
        engine.store(keys)
        assert engine.load(engine.lookup(keys), TARGET) == frozenset(), "the client's own connections go on"
