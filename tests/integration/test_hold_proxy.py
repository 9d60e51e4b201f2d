# SPDX-License-Identifier: Apache-2.0
"""The proxy of the engine tests: bytes pass, one message can be stopped, each end sees the other's death."""

from contextlib import ExitStack

import pytest
from tests.fakes.clients import until
from tests.fakes.hold_proxy import HoldProxy
from tests.fakes.running_server import running_server

from kvpool.client.link import Link
from kvpool.config import ClientConfig
from kvpool.model.identity import ClientKind
from kvpool.model.reasons import UncachedReason
from kvpool.wire.messages import Stats


@pytest.fixture
def proxied(tmp_path):
    """A link that reaches a server through the proxy, and what ends the server."""
    with HoldProxy(tmp_path / "p.sock", tmp_path / "run" / "kvpool.sock") as proxy, ExitStack() as end:
        end.enter_context(running_server(tmp_path))
        link = Link(ClientConfig(server=proxy.address), ClientKind.PROBE)
        link.start()
        assert link.wait_healthy(10)
        yield link, proxy, end
        link.close(0.5)


def test_messages_pass(proxied) -> None:
    link, _, _ = proxied

    assert link.call(Stats())[0].server_id == "test"


def test_the_nth_message_of_a_kind_is_stopped(proxied) -> None:
    link, proxy, _ = proxied
    hold = proxy.hold("stats", 2)

    link.call(Stats())
    call = link.submit(Stats(), deadline_s=10)
    hold.wait_held(10)

    assert not call.done()
    hold.release()
    assert call.wait(10)
    assert call.error() is None


def test_the_servers_end_is_seen_through_it(proxied) -> None:
    link, _, end = proxied

    end.close()

    until(lambda: link.state.reason is UncachedReason.UNREACHABLE)
