# SPDX-License-Identifier: Apache-2.0
"""Which memory a mover has, while regions change hands."""

from collections.abc import Iterator

import pytest
from tests.fakes.engines import FakeClient, digests
from tests.fakes.ring_clients import RingClient, RingWorld

from kvpool.model.identity import Mode


@pytest.fixture
def world() -> Iterator[RingWorld]:
    made = RingWorld()
    yield made
    made.close()


@pytest.mark.behaviour("D117", "D107")
def test_a_mover_has_memory_from_when_it_is_the_servers_and_no_longer_than_it_is(world: RingWorld) -> None:
    mover = RingClient(world).join()
    mapped = FakeClient(world.engine, world.arena).join()
    _, rows = mapped.prepare(digests(7))
    (theirs,) = rows["memory"].tolist()
    assert theirs in mover.given
    world.turn()

    assert mover.given == world.engine.movers.memories() != set()
    assert theirs not in mover.given, "it is a tenant's now"

    world.engine.unregister(mapped.client_id, 0.0)
    world.turn()
    streamed = FakeClient(world.engine, world.arena, mode=Mode.STREAMED).join()
    streamed.prepare(digests(*range(32)))
    assert world.engine.movers.memories() - mover.given, "nothing of it was granted"
    world.turn()

    assert mover.given == world.engine.movers.memories()
