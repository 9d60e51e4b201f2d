# SPDX-License-Identifier: Apache-2.0
"""Run pytest; a few failed tests are run once more, in a process of their own, and are named in any case.

    python -m tools.second_try tests -q

For machines that others use at the same moment, where a deadline can pass although nothing is wrong. More than ``MOST``
failures, errors of collection and tests that fail twice end it as pytest ends. A test that needed its second try is
unsteady: it is printed at the end, to be looked into.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

__all__ = ["MOST", "run"]

MOST: Final = 3
"""More failed tests than these are no accident."""

_TESTS_FAILED: Final = 1

Pytest = Callable[[Sequence[str]], int]
"""Runs pytest with arguments; returns its exit status."""


def run(arguments: Sequence[str], pytest: Pytest) -> int:
    """Run *arguments* once, and what failed of them once more; returns the last exit status."""
    with tempfile.TemporaryDirectory() as folder:
        kept = [*arguments, "-o", f"cache_dir={folder}"]
        status = pytest(kept)
        failed = _failed(Path(folder))
        if status != _TESTS_FAILED or not 0 < len(failed) <= MOST:
            return status
        print(f"second try of {len(failed)} failed tests", flush=True)
        status = pytest([*kept, "--last-failed"])
    for test in failed:
        print(f"{'unsteady' if status == 0 else 'failed in the first try'}: {test}", flush=True)
    return status


def _failed(folder: Path) -> list[str]:
    record = folder / "v" / "cache" / "lastfailed"
    return sorted(json.loads(record.read_text())) if record.exists() else []


def _pytest(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], _pytest))
