# SPDX-License-Identifier: Apache-2.0
"""A server is found among many of which most hang: connections are taken, and nothing is ever said."""

import contextlib
import socket
from time import monotonic

import pytest
from tests.fakes.clients import until
from tests.fakes.scripted_server import ScriptedServer

from kvpool.client.link import Link
from kvpool.config import ClientConfig
from kvpool.model.errors import Busy
from kvpool.model.identity import ClientKind
from kvpool.wire import messages as m

HANGING = 12


@pytest.fixture
def hanging(tmp_path):
    """Addresses of servers that hang."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for number in range(HANGING):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(path := str(tmp_path / f"hangs{number}"))
            listener.listen()
            addresses.append(f"ipc://{path}")
        yield addresses


@pytest.fixture
def link_among():
    links = []

    def make(*servers, connect_s=30.0):
        made = Link(ClientConfig(server="anywhere#scripted", servers=servers, connect_s=connect_s), ClientKind.PROBE)
        made.start()
        links.append(made)
        return made

    yield make
    for made in links:
        made.close(0.2)


@pytest.mark.timeout(20)
def test_servers_that_hang_hide_no_other(server, hanging, link_among):
    """One after the other they would take minutes."""
    assert link_among(*hanging, server.address).wait_healthy(15)


@pytest.mark.timeout(20)
def test_while_all_are_well_no_more_are_asked_than_need_be(server, tmp_path_factory, link_among):
    with ScriptedServer(tmp_path_factory.mktemp("other"), welcome={"server_id": "other"}) as other:
        late = ScriptedServer(tmp_path_factory.mktemp("late"), welcome={"server_id": "late"})
        late.start()

        assert link_among(other.address, server.address, late.address).wait_healthy(10)

        late.stop()
        assert (len(other.of(m.Hello)), len(late.of(m.Hello))) == (1, 0)


@pytest.mark.timeout(20)
def test_it_is_over_when_the_last_one_had_its_time(hanging, link_among):
    link = link_among(*hanging, "ipc:///nowhere", connect_s=0.2)

    until(lambda: f"none of the {HANGING + 1} servers" in link.state.detail, 10)

    assert "did not answer" in link.state.detail


@pytest.mark.timeout(20)
def test_a_refusal_is_no_server_of_that_id(server, tmp_path_factory, link_among):
    with ScriptedServer(tmp_path_factory.mktemp("other")) as other:
        other.fail(m.Hello, Busy("too many clients"), times=100)

        assert link_among(other.address, server.address).wait_healthy(10)


@pytest.mark.timeout(20)
def test_a_link_that_is_closed_while_it_looks_waits_for_nobody(hanging, link_among):
    link = link_among(*hanging)
    until(link._thread.is_alive)

    began_s = monotonic()
    link.close(0.1)

    assert not link._thread.is_alive()
    assert monotonic() - began_s < 5


@pytest.mark.timeout(30)
def test_what_cannot_be_a_name_is_a_server_that_is_not_there(link_among):
    link = link_among(f"tcp://{'a' * 64}.test:1", "tcp://a..b:1")
    until(lambda: "did not answer" in link.state.detail)

    named = Link(ClientConfig(server=f"tcp://{'a' * 64}.test:1#scripted"), ClientKind.PROBE)
    named.start()
    try:
        until(lambda: "cannot be resolved" in named.state.detail)
    finally:
        named.close(0.2)
