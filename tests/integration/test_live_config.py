# SPDX-License-Identifier: Apache-2.0
"""A real server whose configuration file changes while engines use it."""

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.arenas_on_disk import slots_of, store
from tests.fakes.clients import FakeEngine, digests, until
from tests.fakes.server_process import ServerProcess

from kvpool.arena.opening import open_arena
from kvpool.config import L1Config, decode_server, live_digest
from kvpool.model.identity import Mode

MIB = 1 << 20
LONG_AGO = 1e9


class Live:
    """The server, and how to change its file and to look at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = ServerProcess(
            folder,
            size_bytes=32 * MIB,
            l1={"max_bytes": 64 * MIB},
            http={"operations_host": "127.0.0.1", "operations_port": 0},
        )
        self.process.config["living_pools"] = ["local", "other"]

    def change(self, **l1: Any) -> None:
        self.process.config["l1"] |= l1
        self.write(json.dumps(self.process.config))

    def write(self, text: str) -> None:
        """As an editor does: a new file in the place of the old one."""
        fresh = self.folder / "fresh.json"
        fresh.write_text(text)
        fresh.rename(self.folder / "server.json")

    def status(self) -> dict[str, Any]:
        return status_of(self.process.operations)

    def reaches(self, **wanted: Any) -> dict[str, Any]:
        """Wait until the status says so."""
        return until(lambda: s if wanted.items() <= (s := self.status()).items() else None, 20)  # type: ignore[return-value]

    def memory(self) -> int:
        return sum(f.stat().st_blocks * 512 for f in (self.folder / "l1").glob("*.data"))


def status_of(operations: str) -> dict[str, Any]:
    """What the server with that operations face says of itself."""
    host, _, port = operations.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    connection.request("GET", "/status")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    made = Live(tmp_path)
    with made.process:
        until(lambda: made.process.endpoints, 30)
        yield made


def test_l1_grows_and_shrinks_under_an_engine_without_a_restart(live: Live) -> None:
    before = live.reaches(l1_bytes=32 * MIB)
    with FakeEngine(live.process.address, Mode.STREAMED) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        first = digests(16, "first")
        engine.store(first)

        live.change(size_bytes=64 * MIB)
        live.reaches(l1_bytes=64 * MIB, l1_wanted_bytes=64 * MIB)
        for n in range(19):
            engine.store(digests(16, f"more {n}"))
        until(lambda: live.status()["l1_used_bytes"] > 36 * MIB, 20)
        assert engine.lookup(first).chunks == 16
        until(lambda: live.memory() >= 64 * MIB, 20)

        live.change(size_bytes=16 * MIB)
        small = live.reaches(l1_bytes=16 * MIB, l1_wanted_bytes=16 * MIB, l1_mapped_bytes=0)
        assert small["l1_used_bytes"] <= 16 * MIB
        until(lambda: live.memory() <= 16 * MIB, 20)
        again = digests(16, "again")
        engine.store(again)
        assert engine.load(engine.lookup(again), 128) == frozenset()
        assert (engine.bytes_of(128, 16) == engine.bytes_of(0, 16)).all()

    assert small["boot_id"] == before["boot_id"]
    assert small["restart_needed"] == []
    assert small["config_refused"] == ""


def test_memory_that_an_engine_has_mapped_goes_when_it_ends(live: Live) -> None:
    with FakeEngine(live.process.address, Mode.CLIENT_MOVED) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        for n in range(14):
            engine.store(digests(16, str(n)))

        live.change(size_bytes=16 * MIB)

        held = live.reaches(l1_bytes=16 * MIB)
        assert held["l1_mapped_bytes"] > 0
    live.reaches(l1_mapped_bytes=0)
    until(lambda: live.memory() <= 16 * MIB, 20)


def test_watermarks_change_what_the_background_evicts(live: Live) -> None:
    with FakeEngine(live.process.address, Mode.STREAMED) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        for n in range(7):
            engine.store(digests(16, str(n)))
    until(lambda: live.status()["l1_used_bytes"] >= 14 * MIB, 20)

    live.change(evict_above=0.25, evict_to=0.125)

    until(lambda: live.status()["l1_used_bytes"] <= 4 * MIB, 20)


def test_a_tenant_gets_a_share_of_its_own_while_the_server_runs(live: Live) -> None:
    with FakeEngine(live.process.address, Mode.STREAMED) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        for n in range(14):
            engine.store(digests(16, str(n)))
        until(lambda: live.status()["l1_used_bytes"] >= 26 * MIB, 20)

        live.change(quotas={"default": 0.25})

        # Its chunks lie in what is everybody's now; room of its own comes from the rest.
        until(lambda: live.status()["restart_needed"] == [] and "config.followed" in live.process.log, 20)
        mine = digests(16, "mine")
        engine.store(mine)
        assert engine.load(engine.lookup(mine), 128) == frozenset()
        live.change(quotas={"somebody else": 1.0})
        until(lambda: live.process.log.count("config.followed") == 2, 20)
        until(lambda: live.status()["l1_used_bytes"] == 0, 30)
        live.change(quotas={"a": 0.6, "b": 0.6})
        assert "l1.quotas" in until(lambda: live.status()["config_refused"], 20)


def test_what_cannot_be_followed_is_said_and_the_server_goes_on(live: Live) -> None:
    live.change(size_bytes=256 * MIB)
    assert "more than this server can have" in until(lambda: live.status()["config_refused"], 20)
    live.reaches(l1_bytes=64 * MIB)

    live.write("{")
    until(lambda: "no valid JSON" in live.status()["config_refused"], 20)

    live.process.config["chunk_tokens"] = 32
    live.change(size_bytes=32 * MIB, verify_loads=0.5)
    live.reaches(l1_bytes=32 * MIB, config_refused="", restart_needed=["chunk_tokens", "l1.verify_loads"])
    with FakeEngine(live.process.address, Mode.STREAMED) as engine:
        engine.healthy()
        assert engine.worker_link.state.welcome.chunk_tokens == 16, "it counts from the next start on"


def test_the_status_names_the_settings_that_are_followed(live: Live) -> None:
    def digest(**more: Any) -> str:
        return live_digest(decode_server(json.dumps(live.process.config | more).encode(), {}))

    live.reaches(live_digest=digest())

    live.process.config["auth"] = {"tenant": "guests"}
    live.change(quotas={"guests": 0.5})
    guests = live.reaches(live_digest=digest())["live_digest"]

    live.change(quotas={"a": 0.6, "b": 0.6})
    refusing = until(lambda: s if (s := live.status())["config_refused"] else None, 20)
    assert refusing["live_digest"] == guests, "it goes on with what it had"


def test_a_restart_at_another_size_keeps_what_fits(live: Live) -> None:
    with FakeEngine(live.process.address, Mode.STREAMED) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        live.change(size_bytes=64 * MIB)
        live.reaches(l1_bytes=64 * MIB)
        kept = digests(16, "kept")
        engine.store(kept)
        live.process.config["l1"]["size_bytes"] = 16 * MIB
        boot = live.status()["boot_id"]
        live.process.restart()
        until(lambda: live.process.log.count("server.ready") == 2, 30)
        engine.healthy()
        assert live.reaches(l1_bytes=16 * MIB)["boot_id"] != boot

        assert engine.lookup(kept).chunks == 16


def test_the_list_of_living_pools_sweeps_at_once(live: Live) -> None:
    for pool in ("other", "gone"):
        config = L1Config(size_bytes=16 * MIB, directory=str(live.folder / "l1"), allow_disk=True)
        with open_arena(config, pool) as arena:
            arena.format(0, MIB, "t")
            store(arena, slots_of(arena, 0, 0), 1)
        for file in (live.folder / "l1").glob(f"*.{pool}.*"):
            os.utime(file, (LONG_AGO, LONG_AGO))

    live.process.config["living_pools"] = ["local", "other", "new"]
    live.change()

    until(lambda: not list((live.folder / "l1").glob("*.gone.*")), 20)
    assert list((live.folder / "l1").glob("*.other.*"))
