# SPDX-License-Identifier: Apache-2.0
"""What a user sees when something is wrong: real processes, exit codes, field and remedy, never a traceback."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.cli.bench.own_server import OwnServer

NOBODY = 65534


def kvpool(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kvpool.cli.main", *arguments],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environ},
    )  # fmt: skip


def as_nobody(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command with another user's rights; what it imports is read before, as root."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    script = (
        "import os, sys\n"
        "import kvpool.cli.server, kvpool.cli.status, kvpool.server.compose, encodings.idna\n"
        "from kvpool.cli.main import main\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def assert_said(done: "subprocess.CompletedProcess[str]", code: int, *words: str) -> None:
    said = done.stderr + done.stdout
    assert done.returncode == code, said
    assert "Traceback" not in said
    assert [w for w in words if w not in said] == [], said


def test_wrong_value() -> None:
    assert_said(kvpool("server", "--set", "limits.lanes=1000"), 2, "limits.lanes", "64", "configuration.md")


def test_wrong_variable() -> None:
    done = kvpool("server", KVPOOL_SERVER__L1__SIZE_BYTES="much")

    assert_said(done, 2, "KVPOOL_SERVER__L1__SIZE_BYTES", "'much'", "8GiB")


def test_unknown_field(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    file.write_text('{"l1": {"siez_bytes": 1}}')

    assert_said(kvpool("server", "--config", str(file)), 2, "siez_bytes", str(file), "remove it")


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    done = kvpool(
        "server", "--set", "l1.size_bytes=60TiB", "--set", f"l1.directory={tmp_path}", "--set", "l1.allow_disk=true",
        "--set", f"listen.socket_path={tmp_path}/s", "--set", "http.operations_host=",
    )  # fmt: skip

    assert_said(done, 1, "l1.size_bytes", "lower l1.size_bytes to at most")
    assert not (tmp_path / "s").exists()


def test_folder_that_cannot_be_made() -> None:
    folder, memory = Path("/run/kvpool-not-for-nobody"), Path("/dev/shm") / f"kvpool-nobody-{os.getpid()}"
    try:
        done = as_nobody(
            "server", "--set", f"listen.socket_path={folder}/kvpool.sock", "--set", f"l1.directory={memory}",
            "--set", "l1.size_bytes=16MiB", "--set", "http.operations_host=",
        )  # fmt: skip
    finally:
        shutil.rmtree(memory, ignore_errors=True)

    assert_said(done, 1, "listen.socket_path", "not permitted", "another path")


def test_absent_server(tmp_path: Path) -> None:
    done = kvpool("status", "--server", f"ipc://{tmp_path}/none")

    assert_said(done, 1, f"--server ipc://{tmp_path}/none", "start a server with `kvpool server`")


def test_missing_permission_on_the_socket() -> None:
    with OwnServer(32 << 20) as server:
        server.folder.chmod(0o755)

        done = as_nobody("status", "--server", server.client.server)

        assert_said(done, 1, "permission denied", "listen.socket_mode")


def test_a_second_server_on_the_same_socket() -> None:
    with OwnServer(32 << 20) as server:
        done = kvpool(
            "server", "--set", f"listen.socket_path={server.socket}", "--set", f"l1.directory={server.memory}/other",
            "--set", "http.operations_host=",
        )  # fmt: skip

        assert_said(done, 1, "listen.socket_path", "another server")


def test_admin_socket_that_is_none(tmp_path: Path) -> None:
    with OwnServer(32 << 20) as server:
        done = kvpool("status", "--server", server.client.server, "--admin", str(tmp_path / "none"))

    assert_said(done, 1, "--admin", "http.admin_socket")
