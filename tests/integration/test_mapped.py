# SPDX-License-Identifier: Apache-2.0
"""Mode mapped whole: engines whose cache is files, a real server, movers that map them and move real bytes."""

import time

import pytest
from tests.fakes.clients import CHUNK_BYTES, until
from tests.fakes.mapped_engine import MappedEngine
from tests.fakes.server_process import WITH_FAKE_MOVERS, ServerProcess
from tests.integration.test_ring_failures import joined, movers_of, round_trip

from kvpool.cli import admin
from kvpool.model.identity import Mode
from kvpool.model.reasons import UncachedReason

PATIENCE_S = 60.0


@pytest.fixture
def server(tmp_path):
    options = {"leases": {"store_s": 3.0, "lookup_s": 3.0}, "http": {"admin_socket": str(tmp_path / "admin.sock")}}
    with ServerProcess(tmp_path, program=WITH_FAKE_MOVERS, **options) as server:
        yield server


def row_of(server):
    (row,) = admin.movers_of(server.config["http"]["admin_socket"])
    return row


@pytest.mark.parametrize("virtual", [False, True], ids=["handles", "descriptors"])
def test_the_mover_moves_the_blocks_and_status_says_so(server, virtual):
    with MappedEngine(server.address, model="m", virtual=virtual) as engine:
        engine.healthy()
        joined(engine)
        engine.blocks.fill(1)

        assert round_trip(engine, "a")

        assert set(engine.cache.ways) == {"copies"}, "blocks in a row need no kernel"
        until(lambda: row_of(server)["loaded_bytes"], PATIENCE_S)
        row = row_of(server)
        assert (row["mode"], row["joined"], row["stored_bytes"]) == ("mapped", True, 4 * CHUNK_BYTES)
        assert row["mode_reason"] == "the client exports its cache; its mover says whether it can map it"
        assert row["slots"] == 3
    until(lambda: not movers_of(server), PATIENCE_S)


def test_a_cache_that_cannot_be_mapped_leaves_another_way_with_the_reason(server):
    engine = MappedEngine(server.address, model="m")
    engine.cache.let("refuse")
    with engine:
        until(lambda: engine.worker_link.state.mode is Mode.STREAMED, PATIENCE_S)
        until(lambda: engine.scheduler_link.state.healthy, PATIENCE_S)
        engine.blocks.fill(3)

        assert until(lambda: round_trip(engine, time.monotonic()), PATIENCE_S)

        why = "no ring: not mapped: the client: the mover cannot map the cache: the kernel cannot be made"
        assert why in row_of(server)["mode_reason"]


def test_an_engine_whose_only_way_is_refused_runs_uncached_with_the_reason(server):
    engine = MappedEngine(server.address, Mode.MAPPED, model="m")
    engine.cache.let("refuse")
    with engine:
        until(lambda: "mapped alone is allowed" in engine.worker_link.state.detail, PATIENCE_S)

        assert engine.worker_link.state.reason is UncachedReason.UNREACHABLE
        assert "the kernel cannot be made" in engine.worker_link.state.detail


@pytest.mark.parametrize("mapped_first", [True, False])
def test_a_server_that_starts_no_movers_says_so(tmp_path, mapped_first):
    http = {"admin_socket": str(tmp_path / "admin.sock")}
    modes = (Mode.MAPPED, Mode.STREAMED) if mapped_first else (Mode.STREAMED, Mode.MAPPED)
    with (
        ServerProcess(tmp_path, program=WITH_FAKE_MOVERS, http=http, mover={"ring": False}) as server,
        MappedEngine(server.address, *modes, model="m") as engine,
    ):
        until(lambda: engine.worker_link.state.mode is Mode.STREAMED, PATIENCE_S)

        said = "; not mapped: switched off at this server (mover.ring)"
        assert row_of(server)["mode_reason"] == "the client asked for it" + said * mapped_first


def test_a_restarted_server_maps_the_cache_again(server):
    with MappedEngine(server.address, model="m", request_s=2.0) as engine:
        engine.healthy()
        engine.blocks.fill(4)
        assert round_trip(engine, "before")
        before, epoch = movers_of(server), engine.worker_link.state.epoch
        server.restart()
        until(lambda: engine.worker_link.state.epoch > epoch, PATIENCE_S)
        joined(engine)
        until(lambda: engine.scheduler_link.state.healthy, PATIENCE_S)

        assert until(lambda: round_trip(engine, "after"), PATIENCE_S)
        assert not set(before) & set(movers_of(server))
