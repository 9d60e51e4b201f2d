# SPDX-License-Identifier: Apache-2.0
"""The ways without a ring for blocks on a device: the contract of all ways, and what becomes of locked pages."""

import itertools

import pytest
from tests.contract.test_transfer_contract import *  # noqa: F403 - its tests, over the fixtures below
from tests.contract.test_transfer_contract import BLOCKS, MOVERS, TARGET, engine, poison, server
from tests.fakes.clients import digests, until
from tests.fakes.mapped_engine import MappedEngine
from tests.fakes.ring_engine import RingEngine
from tests.fakes.staged_engine import StagedEngine, staging

from kvpool.model.identity import Mode

__all__ = ["engine", "new_engine", "server", "way"]

READ_ONLY = 8


@pytest.fixture(params=(Mode.CLIENT_MOVED, Mode.STREAMED), ids=str)
def way(request):
    return request.param


@pytest.fixture
def device(caplog):
    with staging() as made:
        yield made
        if not any(record.exc_info for record in caplog.get_records("call")):  # whose frames have views
            assert not made[0].registered, "all of it goes with the session"


@pytest.fixture
def new_engine(server, way, device, request):
    def make(mode=way, **options):
        options |= {"blocks": BLOCKS, "model": request.node.name}
        if mode in MOVERS:
            return {Mode.RING: RingEngine, Mode.MAPPED: MappedEngine}[mode](server.address, mode, **options)
        return StagedEngine(server.address, mode, make=device[1], **options)

    return make


def round_trip(engine, name):
    keys = digests(3, name)
    engine.store(keys)
    poison(engine)
    assert engine.load(engine.lookup(keys, name), TARGET, request_id=name) == frozenset()
    assert (engine.bytes_of(TARGET, 3) == engine.bytes_of(0, 3)).all()


@pytest.mark.parametrize("way", [Mode.CLIENT_MOVED], indirect=True)
def test_copy_engines_move_to_and_from_the_arena_once_it_is_locked(engine, monkeypatch):
    from kvpool.transfer.kernels import staged

    long_way, host = [], staged._Stage.host
    monkeypatch.setattr(staged._Stage, "host", lambda stage, *a: long_way.append(stage) or host(stage, *a))
    trips = itertools.count()

    def none_went_the_long_way():
        long_way.clear()
        round_trip(engine, f"trip {next(trips)}")
        return not long_way

    until(none_went_the_long_way)


@pytest.mark.parametrize("way", [Mode.CLIENT_MOVED], indirect=True)
def test_what_the_driver_does_not_lock_goes_the_long_way(engine, device, caplog):
    driver, _ = device
    driver.refused = READ_ONLY
    round_trip(engine, "first")

    until(lambda: "memory that is only read stays out of reach" in caplog.text and driver.registered)
    round_trip(engine, "second")
    assert set(driver.registered.values()) == {0}
