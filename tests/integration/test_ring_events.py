# SPDX-License-Identifier: Apache-2.0
"""What goes through a ring follows what the engine's device was told to do before: its event reaches the lane."""

from types import SimpleNamespace

import pytest
from tests.fakes.clients import digests, until
from tests.fakes.ring_engine import RingEngine
from tests.fakes.server_process import WITH_FAKE_MOVERS, ServerProcess

from kvpool.transfer.mover.messages import Direction

KEYS = digests(2)
TARGET = 128


@pytest.mark.behaviour("R014", "D001")
def test_the_engines_events_are_followed(tmp_path):
    with ServerProcess(tmp_path, program=WITH_FAKE_MOVERS) as server, RingEngine(server.address) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        followed = []
        engine.device.follow = lambda *what: followed.append(what)

        job = engine.begin_store(KEYS, ready=False)
        job.after = SimpleNamespace(event=7)
        job.ready.set()
        until(lambda: engine.poll() and engine.stored)
        engine.begin_load(engine.lookup(KEYS), TARGET, after=SimpleNamespace(event=8))
        until(lambda: engine.poll() and engine.loaded)

        assert engine.loaded == [("l", frozenset())]
        assert (engine.bytes_of(TARGET, 2) == engine.bytes_of(0, 2)).all()
        assert followed == [(Direction.STORE, 7), (Direction.LOAD, 8)]
