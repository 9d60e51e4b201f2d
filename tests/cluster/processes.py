# SPDX-License-Identifier: Apache-2.0
"""Processes of one run: started with logs to files, recorded by id and start time, ended by those records alone.

A run's folder names its owner. What a dead run left behind is found by the records in its folder, checked against start
times so that a process id used again is never hit, and ended by the next run.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Processes", "StartError", "sweep", "wait_for"]

_OWNER = "owner"


class StartError(RuntimeError):
    """A process did not get ready; the text holds the end of its log."""


def wait_for(what: str, ready: Callable[[], bool], deadline_s: float = 60.0, interval_s: float = 0.05) -> None:
    """Return once *ready* says so.

    Raises:
        TimeoutError: not within *deadline_s*.
    """
    end = time.monotonic() + deadline_s
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {deadline_s} s")
        threading.Event().wait(interval_s)  # between two looks at something that cannot tell us


def _start_ticks(pid: int) -> str | None:
    """When process *pid* started, in the kernel's ticks; None if there is none (a zombie counts as none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


@dataclass
class Processes:
    """The processes of one run."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "pids").mkdir(parents=True, exist_ok=True)
        (self.folder / "logs").mkdir(exist_ok=True)
        _record(self.folder / "pids" / _OWNER, os.getpid())

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        ready: Callable[[], bool],
        *,
        environ: Mapping[str, str] | None = None,
        deadline_s: float = 120.0,
    ) -> None:
        """Start *command* as *name* and wait until *ready*.

        Raises:
            StartError: it ended, or was not ready in time.
        """
        log = self.log(name)
        with log.open("ab") as out:
            process = subprocess.Popen(
                [str(c) for c in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=None if environ is None else {**os.environ, **environ},
                start_new_session=True,
            )
        self.running[name] = process
        _record(self.folder / "pids" / name, process.pid)
        try:
            wait_for(name, lambda: process.poll() is not None or ready(), deadline_s)
        except TimeoutError as e:
            raise StartError(f"{e}\n{self.tail(name)}") from e
        if process.poll() is not None:
            raise StartError(f"{name}: ended with {process.returncode}\n{self.tail(name)}")

    def log(self, name: str) -> Path:
        """Where *name* writes to."""
        return self.folder / "logs" / f"{name}.log"

    def tail(self, name: str, lines: int = 30) -> str:
        """The end of *name*'s log."""
        return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-lines:])

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to *name*."""
        self.running[name].send_signal(number)

    def stop(self, name: str, grace_s: float = 3.0) -> None:
        """End *name*: asked first, killed after *grace_s*. Not running is fine."""
        process = self.running.pop(name, None)
        if process is None:
            return
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
                break
        (self.folder / "pids" / name).unlink(missing_ok=True)

    def stop_all(self, grace_s: float = 3.0) -> None:
        """End all, the last started first."""
        for name in reversed(list(self.running)):
            self.stop(name, grace_s)


def _record(file: Path, pid: int) -> None:
    file.write_text(json.dumps({"pid": pid, "start": _start_ticks(pid)}))


def _alive(file: Path) -> int | None:
    """The recorded process id, if that very process still runs."""
    try:
        record = json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    start = _start_ticks(record["pid"])
    return record["pid"] if start is not None and start == record["start"] else None


def sweep(base: Path) -> list[Path]:
    """End what dead runs below *base* left running and remove their folders; returns those."""
    dead = [run for run in base.glob("*") if (run / "pids").is_dir() and _alive(run / "pids" / _OWNER) is None]
    for run in dead:
        for file in (run / "pids").iterdir():
            if (pid := _alive(file)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(run, ignore_errors=True)
    return dead
