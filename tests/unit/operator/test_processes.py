# SPDX-License-Identifier: Apache-2.0
"""Processes of test runs: ended by their records, also those of a run that died."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.processes import Processes, StartError, sweep, wait_for

SLEEPER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
DEAF = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()",
]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def up(processes: Processes, name: str) -> bool:
    return "up" in processes.log(name).read_text()


@pytest.mark.parametrize("command", [SLEEPER, DEAF], ids=["polite", "deaf"])
def test_a_process_is_started_logged_and_ended(tmp_path: Path, command: list[str]) -> None:
    processes = Processes(tmp_path)
    processes.start("one", command, lambda: up(processes, "one"))
    pid = processes.running["one"].pid
    assert alive(pid)

    processes.stop("one", grace_s=0.2)
    processes.stop("one")

    assert not alive(pid)
    assert not (tmp_path / "pids" / "one").exists()


def test_a_process_that_ends_at_once_shows_its_last_words(tmp_path: Path) -> None:
    processes = Processes(tmp_path)

    with pytest.raises(StartError, match="no way"):
        processes.start("one", [sys.executable, "-c", "import sys; sys.exit('no way')"], lambda: False)


def test_what_a_dead_run_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    living = Processes(tmp_path / "living")
    living.start("one", SLEEPER, lambda: up(living, "one"))
    script = (
        "import os, sys; from pathlib import Path; from tests.cluster.processes import Processes\n"
        f"p = Processes(Path({str(tmp_path / 'dead')!r}))\n"
        f"p.start('left', {SLEEPER!r}, lambda: 'up' in p.log('left').read_text())\n"
        "os._exit(1)\n"
    )
    root = str(Path(__file__).parents[3])
    subprocess.run([sys.executable, "-c", script], check=False, env={**os.environ, "PYTHONPATH": root}, timeout=60)
    left = json.loads((tmp_path / "dead" / "pids" / "left").read_text())["pid"]
    assert alive(left)
    used_again = tmp_path / "dead" / "pids" / "used-again"
    used_again.write_text(json.dumps({"pid": living.running["one"].pid, "start": "1"}))

    assert sweep(tmp_path) == [tmp_path / "dead"]

    wait_for("its end", lambda: not alive(left), 10)
    assert not (tmp_path / "dead").exists()
    assert alive(living.running["one"].pid), "same process id, another start time"
    living.stop_all()


def test_waiting_ends() -> None:
    with pytest.raises(TimeoutError, match="never"):
        wait_for("never", lambda: False, 0.1)
