# SPDX-License-Identifier: Apache-2.0
"""Why nothing answers at an address, in words."""

import io
import os
import socket
from pathlib import Path

import pytest

from kvpool.cli.connect import descriptor_problem, listening_problem
from kvpool.cli.progress import progress


def test_absent_socket(tmp_path: Path) -> None:
    assert "kvpool server" in listening_problem(f"ipc://{tmp_path}/absent")


def test_socket_of_a_dead_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    assert "nobody listens" in listening_problem(f"ipc://{path}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may connect to everything; tests/integration drops its rights")
def test_forbidden_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0)

        assert "listen.socket_mode" in listening_problem(f"ipc://{path}")


def test_living_listeners_are_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.bind(str(path))
        unix.listen()

        assert listening_problem(f"ipc://{path}") == ""
        assert listening_problem(f"tcp://127.0.0.1:{tcp.getsockname()[1]}") == ""
        assert descriptor_problem(str(path)) == ""
    assert "Connection refused" in descriptor_problem(str(path))
    assert descriptor_problem("") == ""


def test_closed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        port = tcp.getsockname()[1]

    assert "nobody listens" in listening_problem(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address", [f"tcp://{'a' * 64}.test:1", "tcp://a..b:1", "tcp://localhost:99999", "tcp://[::1:7410"]
)
def test_what_cannot_be_an_address(address: str) -> None:
    assert "check the address" in listening_problem(address)


def test_short_work_shows_no_progress() -> None:
    out = io.StringIO()

    with progress("working", out):
        pass

    assert out.getvalue() == ""
