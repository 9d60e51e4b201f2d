# SPDX-License-Identifier: Apache-2.0
"""A server from its start to its end: what comes before the first client, what is left after the last, what it logs."""

import contextlib
import http.client
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.fakes.running_server import running_server, server_config

from kvpool.config import HttpConfig, LimitConfig
from kvpool.model.slots import Disposition
from kvpool.server import compose
from kvpool.wire import messages as m
from kvpool.wire.codec import placements_of

SHARD = 8192


def descriptors() -> set[str]:
    """What this process has open, by name."""
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            names.add(f"{link.name}: {link.readlink()}")
    return names


def store(client, bulk, digests, complete):
    """Store one chunk for each 32 bytes, of which *complete* says whether it got there; returns the reply."""
    store_id, count = os.urandom(16), len(digests) // 32
    _, (raw,) = client.ask(m.PrepareStore(request_id="s", store_id=store_id), digests)
    for chunk in np.flatnonzero(placements_of(raw, count)["disposition"] == Disposition.WRITE).tolist():
        bulk.ask(m.WriteChunk(store_id=store_id, chunk=chunk, offset=0), bytes(SHARD))
    return client.ask(m.CommitStore(store_id=store_id), bytes(complete), bytes(16 * count))[0]


def load(client, bulk, digests):
    lookup_id = os.urandom(16)
    found = client.ask(m.Lookup(request_id="l", lookup_id=lookup_id), digests)[0].chunks
    client.ask(m.PrepareRetrieve(lookup_id=lookup_id, end=found))
    for chunk in range(found):
        bulk.ask(m.ReadChunk(lookup_id=lookup_id, chunk=chunk, offset=0, length=SHARD))
    return client.ask(m.CommitRetrieve(lookup_id=lookup_id, end=found), bytes(found))[0].vouched


@pytest.fixture
def pair():
    """Makes a registered client and its bulk connection."""
    opened = []

    def make(server):
        client, bulk = server.connect(), server.connect()
        opened.extend((client, bulk))
        ticket = client.welcome().ticket
        client.register(SHARD)
        bulk.ask(m.AttachBulk(ticket=ticket))
        return client, bulk

    yield make
    for connection in opened:
        connection.close()


@pytest.mark.behaviour("R064")
def test_memory_and_its_recovery_come_before_the_first_client(tmp_path, monkeypatch):
    config = server_config(tmp_path)
    order = []

    def noted(name, call):
        def wrapper(*args, **options):
            order.append((name, Path(config.listen.socket_path).exists()))
            return call(*args, **options)

        return wrapper

    monkeypatch.setattr(compose, "configure", lambda *_: None)
    monkeypatch.setattr(compose, "open_arena", noted("memory", compose.open_arena))
    monkeypatch.setattr(compose.Engine, "recover", noted("recovery", compose.Engine.recover))
    monkeypatch.setattr(compose, "_handle_signals", noted("listening", lambda server: server.request_stop()))

    with capture_logs():
        assert compose.run_server(config) == 0

    assert order == [("memory", False), ("recovery", False), ("listening", True)]


@pytest.mark.behaviour("R063", "R067", "D034")
def test_a_server_that_ended_holds_nothing(tmp_path, pair):
    http_config = HttpConfig(operations_port=0, admin_socket=str(tmp_path / "admin.sock"))
    files, threads = descriptors(), set(threading.enumerate())
    with running_server(tmp_path, http=http_config) as server:
        client, bulk = pair(server)
        assert store(client, bulk, os.urandom(64), [1, 1]).stored == 2
        address, socket_path = server.server.operations_address, Path(server.config.listen.socket_path)
        assert len(descriptors()) > len(files)
        client.close()
        bulk.close()

    assert set(threading.enumerate()) - threads == set()
    assert descriptors() - files == set()
    assert not socket_path.exists()
    assert not Path(http_config.admin_socket).exists()
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(address, timeout=5).request("GET", "/livez")


@pytest.mark.behaviour("R066")
@pytest.mark.parametrize("lanes", [1, 3])
def test_there_are_as_many_copying_threads_as_configured(tmp_path, lanes):
    with running_server(tmp_path, limits=LimitConfig(lanes=lanes)) as server:
        server.ask(lambda: None)
        names = {t.name for t in threading.enumerate() if t.name.startswith("lane-")}

    assert names == {f"lane-{i}" for i in range(lanes)}


@pytest.mark.behaviour("R022", "D037", "D114")
def test_a_store_is_one_line_at_debug_of_what_was_kept_and_nothing_else_is_logged(tmp_path, pair):
    digests = os.urandom(96)
    with running_server(tmp_path) as server, capture_logs() as logs:
        client, bulk = pair(server)
        logs.clear()

        assert store(client, bulk, digests, [1, 1, 0]).stored == 2
        assert store(client, bulk, os.urandom(32), [0]).stored == 0, "of this one nothing is to be said"
        assert load(client, bulk, digests) == 2
        client.ask(m.EndRequest(request_id="l"))

        lines = [line for line in logs if "chunks" in line or line["log_level"] != "debug"]

    assert [(line["log_level"], line["event"], line["chunks"], line["asked"]) for line in lines] == [
        ("debug", "chunks.stored", 2, 3)
    ]
    assert lines[0]["client"] == client.client_id.hex()
