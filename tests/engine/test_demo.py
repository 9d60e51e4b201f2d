# SPDX-License-Identifier: Apache-2.0
"""The first act of `make demo` from end to end: what it prints, writes and leaves behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.harness import ROOT


@pytest.mark.timeout(600)
def test_demo_shows_equal_tokens_from_another_process(engine_python: Path, large_model: Path, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())

    done = subprocess.run(
        [sys.executable, "-m", "tools.demo", "--only", "cache", "--tokens", "1024", "--out", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=580, cwd=ROOT,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["tokens_equal"]
    assert found["loaded_chunks"] == 4
    assert set(found["ttft_s"]) == {"cold", "warm", "loaded"}
    assert "hits: " in done.stdout
    assert (tmp_path / "demo.png").stat().st_size > 0
    assert not [p for p in set(Path("/dev/shm").iterdir()) - before if p.name.startswith("kvpool-bench-")]
