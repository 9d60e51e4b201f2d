# SPDX-License-Identifier: Apache-2.0
"""`kvpool status` and `kvpool doctor` against a real server with real clients."""

import json
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from kvpool.cli.bench.client import BenchClient
from kvpool.cli.bench.own_server import OwnServer
from kvpool.cli.bench.payload import Payload, bench_namespace, make_chain
from kvpool.model.identity import Mode

SHARD_BYTES = 4096


@pytest.fixture
def server() -> Iterator[OwnServer]:
    with OwnServer(64 << 20) as running:
        yield running


def kvpool(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli.main", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(server: OwnServer) -> dict:
    return json.loads(kvpool("status", "--server", server.client.server, "--json"))


def worker(server: OwnServer) -> BenchClient:
    config = msgspec.structs.replace(server.client, label="engine-of-a-test")
    return BenchClient(config, bench_namespace(SHARD_BYTES, 1), Payload(SHARD_BYTES, 1), 8, Mode.CLIENT_MOVED)


def test_verdict_follows_what_engines_do(server: OwnServer) -> None:
    first, second = (make_chain(bench_namespace(SHARD_BYTES, 1), n, 1024, 256, seed=1) for n in range(2))

    assert status(server)["verdict"]["kind"] == "no-client"
    with worker(server) as engine:
        assert status(server)["verdict"]["kind"] == "no-request"
        engine.lookup(first, "miss")
        assert status(server)["verdict"]["kind"] == "nothing-stored"
        engine.end("miss")
        # The store's own check is the first lookup that hits, so only another prompt is asked for here.
        engine.store(first, "store")
        engine.lookup(second, "other")
        engine.end("other")
        engine.load(first, "load")
        found = status(server)

    assert found["verdict"]["kind"] == "hits"
    assert found["stored_chunks"] == 4
    assert found["statistics"]["chunks"] == 4
    assert 0 < found["hit_rate"] < 1


@pytest.mark.behaviour("R059")
def test_clients_and_what_they_hold_are_on_the_admin_face_alone(server: OwnServer) -> None:
    with worker(server) as engine:
        engine.store(chain := make_chain(bench_namespace(SHARD_BYTES, 1), 0, 1024, 256, seed=1), "store")
        engine.lookup(chain, "held")
        public = kvpool("status", "--server", server.client.server, "--json")
        text = kvpool("status", "--server", server.client.server, "--admin", server.admin_socket)

    assert "engine-of-a-test" not in public
    assert "engine-of-a-test" in text
    assert "client-moved" in text
    assert "16 KiB" in text  # four chunks, pinned by the lookup
    assert "1 connected" in text


def test_watch_repeats_until_it_is_interrupted(server: OwnServer) -> None:
    watching = subprocess.Popen(
        [sys.executable, "-m", "kvpool.cli.main", "status", "--server", server.client.server, "--watch", "0.01"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    try:
        seen = 0
        while seen < 3:
            seen += watching.stdout.readline().startswith("verdict")
        watching.send_signal(2)
        watching.stdout.read()
        assert watching.wait(10) == 130
    finally:
        watching.kill()
        watching.communicate()


@pytest.mark.behaviour("R061", "R068")
def test_doctor_finds_nothing_wrong_with_a_good_server(server: OwnServer) -> None:
    found = json.loads(
        kvpool(
            "doctor",
            "--server",
            server.client.server,
            "--json",
            "--set",
            f"l1.directory={server.memory}",
            "--set",
            "l1.size_bytes=64MiB",
            "--set",
            f"listen.socket_path={server.socket}",
        )
    )
    checks = {c["name"]: c for c in found["checks"]}

    assert found["worst"] != "fail"
    assert "handshake and self-test passed" in checks["server"]["text"]
    assert "256 tokens a chunk" in checks["server"]["text"]
    assert "a round trip" in checks["server"]["text"]
    assert checks["transfer mode"]["text"].startswith("client-moved")
    assert checks["memory"]["level"] == "ok"
