# SPDX-License-Identifier: Apache-2.0
"""Fitting an engine to the chunks of whatever server answers."""

import pytest
from tests.fakes.clients import until
from tests.fakes.engine_parts import NAMESPACE
from tests.fakes.scripted_server import ScriptedServer

from kvpool.config import ClientConfig
from kvpool.connector.attach import Attachment
from kvpool.connector.plan import GroupFacts, WorkerFacts
from kvpool.model.identity import ClientKind
from kvpool.model.layout import PlaneSpec
from kvpool.model.reasons import UncachedReason
from kvpool.wire import messages as m


@pytest.fixture
def attach(tmp_path):
    """Attaches an engine with blocks of so many tokens to a server with chunks of so many."""
    made = []

    def attach(block_tokens, chunk_tokens):
        server = ScriptedServer(tmp_path, welcome={"chunk_tokens": chunk_tokens})
        server.start()
        attachment = Attachment(ClientConfig(server=server.address), ClientKind.WORKER)
        made[:] = [server, attachment]
        planes = (PlaneSpec(name="a", block_bytes=64, block_tokens=block_tokens, packing="p"),)
        groups = (GroupFacts(planes=planes, block_tokens=block_tokens),)
        attachment.begin(WorkerFacts(namespace=NAMESPACE, groups=groups), (0,))
        return server, attachment

    yield attach
    server, attachment = made
    attachment.close(0.2)
    server.stop()


@pytest.mark.behaviour("R085", "R123", "D039")
@pytest.mark.parametrize(("block_tokens", "chunk_tokens"), [(3, 16), (32, 16), (5, 256)])
def test_a_chunk_that_is_no_whole_number_of_blocks_is_refused(attach, block_tokens, chunk_tokens):
    server, attachment = attach(block_tokens, chunk_tokens)

    until(lambda: attachment.uncached() is UncachedReason.CHUNK_TOKENS)

    assert attachment.session() is None
    assert not server.of(m.Register)


@pytest.mark.behaviour("R084", "R123")
def test_the_chunks_size_is_the_servers(attach):
    server, attachment = attach(16, 64)

    session = until(attachment.session)

    assert session.chunk_tokens == 64
    assert server.of(m.Register)[0].groups[0].shard_bytes == 4 * 64
