# SPDX-License-Identifier: Apache-2.0
"""The arrows of docs/architecture.md hold, and the contracts would notice if they did not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.architecture.source import ROOT

FAULTS = {
    "a clock in the index": ("index/slots.py", "import time"),
    "pickle in transfer": ("transfer/__init__.py", "import pickle"),
    "the engine in the client": ("client/ports.py", "import kvpool.engine.ports"),
    "a socket in the engine": ("engine/ports.py", "import zmq"),
    "a sibling": ("arena/__init__.py", "import kvpool.engine.ports"),
    "the server in the connector": ("connector/__init__.py", "import kvpool.server.http"),
    "an upward arrow": ("model/keys.py", "import kvpool.config"),
    "a second door to the metrics library": ("metrics/catalogue.py", "import prometheus_client"),
    "a grab bag": ("helpers.py", "X = 1"),
}


def lint(source: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), ROOT / ".importlinter", "--no-cache"],
        env={**os.environ, "PYTHONPATH": str(source)},
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.behaviour("D040", "D103")
def test_all_contracts_are_kept() -> None:
    result = lint(ROOT / "cacheserver")

    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(tmp_path: Path, fault: str) -> None:
    shutil.copytree(ROOT / "cacheserver", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    where, line = FAULTS[fault]
    target = tmp_path / "src" / "kvpool" / where
    before = target.read_text() if target.exists() else ""
    target.write_text(f"{before}\n{line}\n")

    result = lint(tmp_path / "src")

    assert result.returncode == 1, result.stdout + result.stderr
