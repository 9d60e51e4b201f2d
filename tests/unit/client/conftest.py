# SPDX-License-Identifier: Apache-2.0
import pytest
from tests.fakes.clients import FakeEngine
from tests.fakes.scripted_server import ScriptedServer

from kvpool.model.identity import Mode


@pytest.fixture
def server(tmp_path):
    server = ScriptedServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=[Mode.CLIENT_MOVED, Mode.STREAMED])
def mode(request):
    return request.param


@pytest.fixture
def engine(server, mode):
    """A healthy engine whose transfers have one second."""
    with FakeEngine(server.address, mode, transfer_s=1.0, request_s=0.5, lookup_s=0.5) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        yield engine
