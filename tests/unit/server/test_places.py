# SPDX-License-Identifier: Apache-2.0
"""Where movers listen: each on a port of its own, out of a range that others can be told."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.fakes.ports import HOST, free_range

from kvpool.config import ListenConfig, MoverConfig
from kvpool.server.places import MoverPlaces
from kvpool.server.sockets import Origin


@pytest.fixture
def movers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(movers: ExitStack, address: str) -> int:
    """Listen as a mover does; returns the port."""
    _, host, port = address.split(":")
    movers.enter_context(socket.create_server((host, int(port))))
    return int(port)


def test_each_living_mover_has_a_port_of_its_own(movers: ExitStack) -> None:
    first = free_range(4)
    places = MoverPlaces(ListenConfig(socket_path="", tcp_host=HOST), MoverConfig(first_port=first, ports=4))
    lives = start(movers, places.next(Origin.TCP))

    others = [places.next(Origin.TCP) for _ in range(6)]

    assert lives == first
    assert {int(o.rpartition(":")[2]) for o in others} == {first + 1, first + 2, first + 3}


def test_all_ports_in_use_is_the_movers_to_say(movers: ExitStack) -> None:
    first = free_range(2)
    places = MoverPlaces(ListenConfig(socket_path="", tcp_host=HOST), MoverConfig(first_port=first, ports=2))
    for _ in range(2):
        start(movers, places.next(Origin.TCP))

    assert int(places.next(Origin.TCP).rpartition(":")[2]) in (first, first + 1)


def test_without_a_range_the_kernel_chooses() -> None:
    places = MoverPlaces(ListenConfig(socket_path="", tcp_host=HOST), MoverConfig())

    assert places.next(Origin.TCP) == places.next(Origin.TCP) == f"tcp:{HOST}:0"


def test_over_the_socket_each_has_a_socket_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.sock"
    (tmp_path / "kvpool.sock.mdeadbeef").touch()
    places = MoverPlaces(ListenConfig(socket_path=str(path)), MoverConfig())

    one, other = places.next(Origin.UNIX), places.next(Origin.UNIX)

    assert one != other
    assert one.startswith(f"unix:{path}.m")
    assert list(tmp_path.iterdir()) == [], "what a former server left is gone"
