# SPDX-License-Identifier: Apache-2.0
import pytest
from tests.fakes.arena import MemoryArena
from tests.fakes.engines import FakeClient, engine
from tests.property.engine_checks import check

from kvpool.engine.engine import Engine


@pytest.fixture
def arena() -> MemoryArena:
    return MemoryArena()


@pytest.fixture
def eng(arena: MemoryArena):
    made = engine(arena)
    yield made
    check(made)


@pytest.fixture
def client(eng: Engine, arena: MemoryArena) -> FakeClient:
    return FakeClient(eng, arena).join()
