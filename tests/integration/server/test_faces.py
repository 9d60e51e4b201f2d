# SPDX-License-Identifier: Apache-2.0
"""The HTTP faces of a running server."""

import http.client
import json
import os
import socket
import threading

import pytest
from tests.fakes.running_server import running_server

from kvpool.config import GpuConfig, HttpConfig
from kvpool.wire import messages as m

SHARD = 8192
WAIT_S = 5


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=WAIT_S)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(self._path)


@pytest.fixture
def server(tmp_path):
    http_config = HttpConfig(operations_port=0, admin_socket=str(tmp_path / "admin.sock"), live_s=0.3)
    with running_server(tmp_path, http=http_config, drain_s=5.0) as running:
        yield running


def fetch(connection, path, method="GET", body=None):
    connection.request(method, path, body)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def operations(server, path):
    host, _, port = server.server.operations_address.rpartition(":")
    return fetch(http.client.HTTPConnection(host, int(port), timeout=WAIT_S), path)


def admin(server, path, method="GET", body=None):
    status, text = fetch(UnixConnection(server.config.http.admin_socket), path, method, body)
    return status, json.loads(text)


def test_a_serving_server_is_live_and_ready_and_tells_its_numbers(server):
    with server.connect() as c:
        c.welcome(label="secret-pod-name")
        server.ask(server.server._publish)

        assert operations(server, "/live") == (200, "live\n")
        assert operations(server, "/ready") == (200, "ready\n")
        status, text = operations(server, "/status")
        assert status == 200
        assert json.loads(text)["clients"] == 1
        assert "secret-pod-name" not in text
        status, text = operations(server, "/metrics")
        assert 'kvpool_clients{kind="worker"} 1.0' in text
        assert "secret-pod-name" not in text


@pytest.mark.behaviour("D042")
def test_a_loop_that_stands_still_is_not_live_though_the_face_answers(server):
    reached, go = threading.Event(), threading.Event()
    server.server.inbox.post(lambda: (reached.set(), go.wait(WAIT_S)))
    assert reached.wait(WAIT_S)

    assert operations(server, "/live")[0] == 503
    go.set()
    assert operations(server, "/live")[0] == 200


@pytest.mark.behaviour("D113")
def test_the_operations_face_changes_and_betrays_nothing(server):
    for path in ("/env", "/config", "/clients", "/clear", "/loglevel?level=debug"):
        assert operations(server, path)[0] == 404


def test_the_admin_face_names_clients_and_clears(server):
    with server.connect() as c, server.connect() as bulk:
        ticket = c.welcome(label="pod-1").ticket
        c.register(SHARD)
        bulk.ask(m.AttachBulk(ticket=ticket))
        c.ask(m.PrepareStore(request_id="r", store_id=bytes(16)), os.urandom(32))
        bulk.ask(m.WriteChunk(store_id=bytes(16), chunk=0, offset=0), bytes(SHARD))
        status, (row,) = admin(server, "/clients")
        assert (status, row["label"], row["client_id"]) == (200, "pod-1", c.client_id.hex())
        assert row["held_bytes"] == SHARD
        c.ask(m.CommitStore(store_id=bytes(16)), b"\1", bytes(16))

        assert admin(server, "/chunks") == (200, [{"tenant": "default", "model": "tiny", "chunks": 1}])
        assert admin(server, "/clear", "POST", '{"tenant": "other"}') == (200, {"chunks": 0, "kept": 0})
        assert admin(server, "/clear", "POST") == (200, {"chunks": 1, "kept": 0})
        assert server.numbers().chunks == 0


def test_a_draining_server_is_live_and_not_ready(server):
    with server.connect() as c:
        c.welcome()
        c.register(SHARD)
        c.ask(m.PrepareStore(request_id="r", store_id=bytes(16)), os.urandom(32))
        server.server.request_stop()
        while not c.ask(m.Stats())[0].draining:
            pass

        assert operations(server, "/live")[0] == 200
        assert operations(server, "/ready")[0] == 503
        c.ask(m.Unregister())


def test_a_server_that_needs_gpus_and_sees_none_lives_is_not_ready_and_says_why(tmp_path):
    with running_server(
        tmp_path, http=HttpConfig(operations_port=0), gpu=GpuConfig(required=True, look_s=0.05)
    ) as server:
        deadline = threading.Event()
        for _ in range(100):
            server.ask(server.server._publish)
            told = json.loads(operations(server, "/status")[1])
            if told["gpu_reason"] != "NotLooked":
                break
            deadline.wait(0.05)

        assert (told["gpus"], told["gpu_reason"], told["ready"]) == (0, "NoGPUVisible", False)
        assert operations(server, "/ready")[0] == 503
        assert operations(server, "/live")[0] == 200
        with server.connect() as c:
            assert c.welcome(), "whoever finds it is served all the same"
