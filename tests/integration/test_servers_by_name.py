# SPDX-License-Identifier: Apache-2.0
"""Servers behind one name, as a pool's headless Service lists them: each is found by its id, wherever it is now."""

import socket

import pytest
from tests.fakes.clients import FakeEngine, digests, until
from tests.fakes.server_process import ServerProcess

from kvpool.model.reasons import UncachedReason
from kvpool.server.keys import make_key

NAME = "kvpool-main-servers.models.svc"


class Names:
    """Stands for the cluster's name service: what NAME lists now."""

    def __init__(self, monkeypatch):
        self.listed = []
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)

    def _answer(self, host, port, *args, **kwargs):
        if host != NAME:
            return self._real(host, port, *args, **kwargs)
        if not self.listed:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.listed]


class Node:
    """A node with its server, whose address another pod may take over."""

    def __init__(self, folder, name, secret, key):
        folder.mkdir()
        listen = {"socket_path": "", "tcp_host": "", "tcp_port": 0, "curve_key_file": key}
        auth = {"kind": "secret", "secret_file": secret}
        self.server = ServerProcess(folder, listen=listen, auth=auth)
        self.server.config["server_id"] = name

    def start(self, address, port=0):
        """Run the server at *address*; returns its port."""
        self.server.config["listen"] |= {"tcp_host": address, "tcp_port": port}
        before = self.server.log.count('"server.ready"') if (self.server.folder / "server.log").exists() else 0
        self.server.start()
        until(lambda: self.server.log.count('"server.ready"') > before, 30)
        return int(self.server.endpoints[0].rpartition(":")[2])


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Two nodes, the names, and what clients must know."""
    (tmp_path / "secret").write_text("a secret of this pool alone\n")
    public = make_key(str(tmp_path / "key"))
    made = [Node(tmp_path / n, n, str(tmp_path / "secret"), str(tmp_path / "key")) for n in ("node-1", "node-2")]
    yield made, Names(monkeypatch), {"server_key": public, "secret_file": str(tmp_path / "secret"), "connect_s": 0.5}
    for node in made:
        node.server.kill()


@pytest.mark.timeout(90)
def test_a_replaced_server_is_learnt_with_its_cache_and_without_a_restart(pool):
    (first, second), names, config = pool
    port = first.start("127.0.0.1")
    second.start("127.0.0.2", port)
    names.listed = ["127.0.0.1", "127.0.0.2"]
    keys = digests(3)

    with FakeEngine(f"tcp://{NAME}:{port}#node-2", **config) as engine:
        engine.healthy()
        assert engine.worker_link.state.welcome.server_id == "node-2"
        engine.blocks.fill(1)
        engine.store(keys)

        second.server.kill()
        names.listed = ["127.0.0.1"]
        until(lambda: not engine.worker_link.state.healthy, 20)
        second.start("127.0.0.3", port)
        names.listed = ["127.0.0.1", "127.0.0.3"]

        engine.healthy(30)
        answer = engine.lookup(keys)
        assert answer.chunks == 3
        assert engine.load(answer, 100) == frozenset()
        assert (engine.bytes_of(100, 3) == engine.bytes_of(0, 3)).all()


@pytest.mark.timeout(90)
def test_an_engine_may_start_before_its_server_and_before_the_name(pool):
    (first, second), names, config = pool
    port = first.start("127.0.0.1")

    with FakeEngine(f"tcp://{NAME}:{port}#node-2", **config) as engine:
        state = until(lambda: engine.worker_link.state if engine.worker_link.state.reason else None)
        assert state.reason in (UncachedReason.UNREACHABLE, UncachedReason.STARTING)
        until(lambda: "cannot be resolved" in engine.worker_link.state.detail)
        names.listed = ["127.0.0.1"]
        until(lambda: "none of the 1 servers" in engine.worker_link.state.detail)

        second.start("127.0.0.2", port)
        names.listed = ["127.0.0.1", "127.0.0.2"]

        engine.healthy(30)
        assert engine.scheduler_link.state.welcome.server_id == "node-2"
