# SPDX-License-Identifier: Apache-2.0
"""Waits that say what was there instead, if they end: no run on a machine with devices is repeated to find that out."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 30.0
START_S = 60.0
"""For a process that imports torch, maybe from a disk that nobody read before."""

PAUSE_S = 0.005
_USED = "/dev/nvidia-uvm"
_STAYING: set[int] = set()


def until(condition: Callable[[], Any], *, told: Callable[[], object], timeout_s: float = PATIENCE_S) -> Any:
    """Wait until the condition is true, and return its value; if it never is, fail with what is *told* then."""
    ends_s, pause = time.monotonic() + timeout_s, threading.Event()
    while not (value := condition()):
        if time.monotonic() >= ends_s:
            pytest.fail(f"not within {timeout_s:g} s; there is: {told()}")
        pause.wait(PAUSE_S)
    return value


def holders(processes: Path = Path("/proc")) -> dict[int, str]:
    """Other processes that use CUDA, as far as this user may see: number to command. NVML alone does not count."""
    found = {}
    for folder in processes.glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        try:
            opened = [str(file.readlink()) for file in (folder / "fd").iterdir()]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if _USED in opened:
            found[int(folder.name)] = command.strip()[-100:]
    return found


def left_over(timeout_s: float = PATIENCE_S) -> None:
    """Wait until the Pythons of tests and benches before have left the devices: what they free later would confuse.

    Those that stay are known from then on, and no test waits for them again.
    """
    ends_s, pause = time.monotonic() + timeout_s, threading.Event()
    while here := {number for number, command in holders().items() if "python" in command} - _STAYING:
        if time.monotonic() >= ends_s:
            _STAYING.update(here)
        pause.wait(PAUSE_S)
