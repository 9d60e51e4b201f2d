# SPDX-License-Identifier: Apache-2.0
"""`kvpool bench control` end to end with tiny sizes: every cell, the table, the JSON, nothing left behind."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvpool.cli.bench.control import CELLS
from kvpool.cli.bench.own_server import OwnServer
from kvpool.cli.bench.results import BenchReport
from kvpool.cli.connect import Probe

TINY = (
    "--tokens",
    "1024",
    "--clients",
    "2",
    "--seconds",
    "0.05",
    "--shard-bytes",
    "128KiB",
    "--restart-bytes",
    "16MiB",
)


SMALL = ("--metadata-chunks", "2048")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvpool.cli.main", "bench", "control", *TINY, *SMALL, *arguments]


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.slow
def test_every_cell_has_a_number_and_compared_bytes(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"

    done = bench("--json", str(file), "--directory", str(shm := fresh_folder()))

    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(file.read_bytes(), type=BenchReport)
    assert {c.name for c in report.cells} == {
        "lookup", "lookup-first-sight", "store-client-moved", "retrieve-client-moved", "store-streamed",
        "retrieve-streamed", "cycles", "ping-under-load", "client-killed", "restart-term", "restart-kill", "metadata",
    }  # fmt: skip
    for cell in report.cells:
        assert cell.value is not None, cell
        assert cell.value > 0, cell
        assert cell.compared_bytes >= 4 * (128 << 10), cell
        assert cell.name in done.stdout
    assert report.machine["cores"]
    assert report.options["tokens"] == 1024
    assert list(shm.iterdir()) == []
    shm.rmdir()


def test_a_named_server_is_measured_and_left_clean() -> None:
    with OwnServer(64 << 20) as server:
        done = bench("--server", server.client.server, "--cells", "lookup,restart")

        assert done.returncode == 0, done.stderr
        assert "not measured: needs a server of its own" in done.stdout
        with Probe(server.client) as probe:
            assert probe.statistics().chunks == 0


def test_an_interrupted_run_leaves_nothing() -> None:
    shm = fresh_folder()
    running = subprocess.Popen(
        command("--seconds", "60", "--cells", "load", "--directory", str(shm)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stderr is not None
    # The first sign of life comes two seconds into the cell, while server and clients run.
    assert "load (1 of 1)" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=30)

    assert running.returncode == 130
    assert out == ""
    assert list(shm.iterdir()) == []
    shm.rmdir()


def test_unknown_cells_are_refused_with_the_known_ones() -> None:
    done = bench("--cells", "speed")

    assert done.returncode == 2
    assert all(name in done.stderr for name in ("speed", *CELLS))


def fresh_folder() -> Path:
    """A folder on the tmpfs, so that what is left behind can be seen."""
    done = subprocess.run(["mktemp", "-d", "-p", "/dev/shm"], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())
