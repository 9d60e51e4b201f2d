# SPDX-License-Identifier: Apache-2.0
"""The block port over real tensors in every layout that the engine can give them."""

import json
import os
import subprocess
from pathlib import Path

from tests.engine.harness import engine_environ

PAGE = 32 * 4 * 32 * 2 * 4
"""Bytes of a layer's block: tokens, heads, head size, keys and values, float32."""


def test_blocks_move_in_each_layout_of_the_engine(engine_python: Path) -> None:
    script = Path(__file__).resolve().parent / "layout_check.py"
    done = subprocess.run(
        [engine_python, script], env=os.environ | engine_environ(), capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"} <= set(found)
    for name, result in found.items():
        assert result["right"], name
        assert result["block_bytes"] == 3 * PAGE, name
    assert {found[name]["distance"] for name in ("BLHNC", "BLNHC", "BHLNC")} == {3 * PAGE}, "layers within the block"
    assert found["LBHNC"]["distance"] == PAGE
