# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from pathlib import Path

from tests.engine.harness import sweep


def test_memory_of_tests_that_were_killed_is_removed_and_no_other(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    kept = [f"kvpool-test-{os.getpid()}-a", "kvpool-test-x-y", "kvpool-test-x1y2", "other"]
    for name in (f"kvpool-test-{gone.pid}-a", *kept):
        (tmp_path / name / "l1").mkdir(parents=True)

    sweep(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == kept
