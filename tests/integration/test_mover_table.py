# SPDX-License-Identifier: Apache-2.0
"""Which client has which mover, on the admin face of a real server whose movers move real bytes."""

import http.client
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.fakes.clients import CHUNK_BYTES, FakeEngine, digests, until
from tests.fakes.ring_engine import RingEngine
from tests.fakes.server_process import ROOT, WITH_FAKE_MOVERS, ServerProcess

from kvpool.cli.admin import clients_of, movers_of
from kvpool.model.identity import Mode

PATIENCE_S = 60.0
GPU = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.fixture
def server(tmp_path):
    http_section = {"operations_host": "127.0.0.1", "operations_port": 0, "admin_socket": str(tmp_path / "admin.sock")}
    with ServerProcess(tmp_path, program=WITH_FAKE_MOVERS, http=http_section) as server:
        yield server


def movers(server):
    return movers_of(server.config["http"]["admin_socket"])


def joined(engine):
    until(lambda: not engine.rings.reason and engine.rings.current(), PATIENCE_S)


def operations(server):
    host, _, port = server.operations.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", "/status")
    return connection.getresponse().read().decode()


def test_each_worker_is_listed_with_its_mover_or_the_reason_for_none(server):
    with RingEngine(server.address, model="m") as ring, FakeEngine(server.address, Mode.STREAMED, model="n") as other:
        ring.healthy()
        other.healthy()
        joined(ring)
        ring.blocks.fill(1)
        ring.store(digests(4))
        until(lambda: movers(server)[0]["stored_bytes"], PATIENCE_S)

        having, without = movers(server)

        assert b"mover_process" in Path(f"/proc/{having['pid']}/cmdline").read_bytes()
        assert having["gpu"] == GPU
        assert (having["mode"], having["state"], having["joined"]) == ("ring", "ready", True)
        assert (having["slots"], having["slot_bytes"]) == (ring.device.ring.slots, ring.device.ring.slot_bytes)
        assert (having["stored_bytes"], having["loaded_bytes"]) == (4 * CHUNK_BYTES, 0)
        assert having["age_s"] > 0
        assert "has a ring" in having["mode_reason"]
        assert (without["pid"], without["mode"], without["gpu"]) == (None, "streamed", "")
        assert without["mode_reason"] == "the client asked for it"
        known = {c["client_id"] for c in clients_of(server.config["http"]["admin_socket"])}
        assert {having["client_id"], without["client_id"]} <= known
        until(lambda: json.loads(operations(server))["movers"] == {GPU: 1}, PATIENCE_S)
        assert having["client_id"] not in operations(server)


def test_a_ring_that_cannot_be_used_leaves_its_reason_with_the_mode(server):
    engine = RingEngine(server.address, model="m")
    engine.device.ring = msgspec.structs.replace(engine.device.ring, device=bytes(16))
    with engine:
        until(lambda: engine.worker_link.state.mode is Mode.STREAMED, PATIENCE_S)

        (row,) = movers(server)

        assert row["mode"] == "streamed"
        assert "no ring: no such device" in row["mode_reason"]


def test_status_shows_the_movers_below_the_clients(server):
    with RingEngine(server.address, model="m") as engine:
        engine.healthy()
        joined(engine)
        command = [sys.executable, "-m", "kvpool.cli.main", "status", "--server", server.address]
        env = os.environ | {"PYTHONPATH": str(ROOT / "cacheserver")}
        socket = server.config["http"]["admin_socket"]

        text = subprocess.run([*command, "--admin", socket], env=env, capture_output=True, text=True, check=True).stdout
        data = subprocess.run([*command, "--admin", socket, "--json"], env=env, capture_output=True, check=True).stdout

        assert GPU in text
        assert [row["gpu"] for row in json.loads(data)["movers"]] == [GPU]
