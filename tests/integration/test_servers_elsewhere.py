# SPDX-License-Identifier: Apache-2.0
"""One engine over two nodes whose names lead nowhere: the other node's server is found by what else is known of it.

Two real servers and the connector's own halves; each server is asked who it is before it is believed.
"""

import zipfile

import pytest
from tests.fakes.clients import until
from tests.fakes.engine_parts import CHUNK
from tests.fakes.ranks_apart import CHUNKS, RanksApart
from tests.fakes.server_process import ROOT, ServerProcess

from kvpool.model.whereabouts import rendered
from kvpool.server.keys import make_key

SOURCE, TARGET = list(range(1, 11)), list(range(21, 31))
NO_NAME = "tcp://kvpool-main-servers.models.invalid:7410"
"""Stands for a name service that does not know the pool, or is away: this name is reserved never to exist."""


class Nodes:
    """A server on each of two nodes; ranks reach their own by its socket, which says nothing to the other node."""

    def __init__(self, folder, code):
        self.list = folder / "servers"
        (folder / "secret").write_text("a secret of this pool alone\n")
        self.config = {"server_key": make_key(str(folder / "key")), "secret_file": str(folder / "secret")}
        self.servers = []
        for name, path in code.items():
            (folder / name).mkdir()
            auth = {"kind": "secret", "secret_file": str(folder / "secret")}
            where = {"code": path} if path else {}
            server = ServerProcess(folder / name, listen={"curve_key_file": str(folder / "key")}, auth=auth, **where)
            server.config |= {"server_id": name} | ({} if path else {"servers_file": str(self.list)})
            self.servers.append(server)

    def start(self, number, host):
        """Run a server at *host*; returns its address."""
        server = self.servers[number]
        server.config["listen"] |= {"tcp_host": host, "tcp_port": 0}
        before = server.log.count('"server.ready"') if (server.folder / "server.log").exists() else 0
        server.start()
        until(lambda: server.log.count('"server.ready"') > before, 30)
        return next(a for a in server.endpoints if a.startswith("tcp://"))

    def engine(self, **more):
        """An engine with a rank on each node, and its scheduler on the first."""
        addresses = [server.address for server in self.servers]
        return RanksApart(addresses, ["node-1", "node-2"], **(self.config | more))


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path, {"node-1": None, "node-2": None})
    yield made
    for server in made.servers:
        server.kill()


@pytest.fixture
def nodes_with_an_old_server(tmp_path):
    """The first node's server is of the frozen release, which cannot be asked where others are."""
    (wheel,) = (ROOT / "tests" / "golden" / "frozen").glob("kvpool-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "before")
    made = Nodes(tmp_path, {"node-1": tmp_path / "before", "node-2": None})
    yield made
    for server in made.servers:
        server.kill()


def check(engine):
    """What was computed and stored on both nodes is loaded from both, byte for byte."""
    engine.compute("one", SOURCE)
    check_load(engine, "two")


def check_load(engine, request_id):
    for cache in engine.caches:
        for array in cache.values():
            array[TARGET] = 0
    assert engine.hit(request_id) == CHUNKS * CHUNK
    assert engine.load(request_id, TARGET) == set()
    for cache in engine.caches:
        for array in cache.values():
            assert (array[TARGET[:8]] == array[SOURCE[:8]]).all()


def found_by(engine):
    """The session with the other node's server, and what it is called."""
    (label,) = [label for label in engine.scheduler.attachment.states() if "node-2" in label]
    return engine.scheduler.attachment.states()[label].welcome.server_id, label


@pytest.mark.timeout(90)
def test_the_own_nodes_server_knows_where_the_others_are(nodes):
    """The way that needs nothing in the engine's pod."""
    nodes.start(0, "127.0.0.1")
    nodes.list.write_text(rendered({"node-1": "tcp://127.0.0.1:1", "node-2": nodes.start(1, "127.0.0.2")}))
    engine = nodes.engine(all_servers=NO_NAME)
    try:
        engine.healthy(30)
        assert found_by(engine) == ("node-2", f"{NO_NAME}#node-2")
        check(engine)
    finally:
        engine.close()


@pytest.mark.timeout(120)
def test_a_mounted_list_is_read_where_that_server_cannot_be_asked_and_a_replaced_server_is_learnt(
    nodes_with_an_old_server,
):
    """The engine starts before the list and before the other server, and none of it needs a restart."""
    nodes = nodes_with_an_old_server
    nodes.start(0, "127.0.0.1")
    engine = nodes.engine(all_servers=NO_NAME, servers_file=str(nodes.list))
    try:
        until(lambda: "cannot be read" in str(engine.scheduler.attachment.states()), 30)
        nodes.list.write_text(rendered({"node-2": nodes.start(1, "127.0.0.2")}))
        engine.healthy(30)
        check(engine)

        nodes.servers[1].kill()
        until(lambda: engine.scheduler.attachment.down() == 1, 20)
        moved = nodes.start(1, "127.0.0.3")
        assert "127.0.0.3" in moved
        nodes.list.write_text(rendered({"node-2": moved}))

        engine.healthy(30)
        check_load(engine, "after")
    finally:
        engine.close()


@pytest.mark.timeout(120)
def test_a_list_in_the_configuration_is_the_last_way_and_needs_no_ids(nodes_with_an_old_server):
    """Fixed addresses of which one is another server and one is nobody."""
    nodes = nodes_with_an_old_server
    first, second = nodes.start(0, "127.0.0.1"), nodes.start(1, "127.0.0.2")
    engine = nodes.engine(servers=("tcp://127.0.0.4:9", first, f"{first}#node-3", second))
    try:
        engine.healthy(60)
        assert found_by(engine) == ("node-2", "anywhere#node-2")
        check(engine)
    finally:
        engine.close()


@pytest.mark.timeout(60)
def test_a_list_that_names_a_wrong_server_is_not_believed(nodes):
    """Else one node's server would be asked for the shards of another node's ranks."""
    first = nodes.start(0, "127.0.0.1")
    nodes.start(1, "127.0.0.2")
    nodes.list.write_text(f"{first}#node-2\n")
    engine = nodes.engine(servers_file=str(nodes.list))
    try:
        until(
            lambda: "none of the 1 servers that were asked is node-2" in str(engine.scheduler.attachment.states()), 30
        )
        assert engine.hit("one") == 0
    finally:
        engine.close()
