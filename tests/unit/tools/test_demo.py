# SPDX-License-Identifier: Apache-2.0
"""What the demo calls a success, and its picture."""

from dataclasses import replace
from pathlib import Path

import pytest
from tools.demo import Outcome, Run, judge
from tools.demo_picture import draw

GOOD = Outcome(
    cold=Run(2.0, (5, 6, 7), 0),
    warm=Run(0.1, (5, 6, 7), 2048),
    loaded=Run(0.2, (5, 6, 7), 2048),
    loaded_chunks=8,
    first_result_s=31.0,
)


def test_equal_tokens_that_were_loaded_are_a_success() -> None:
    assert GOOD.speedup == pytest.approx(10.0)
    assert GOOD.ttft_s == {"cold": 2.0, "warm": 0.1, "loaded": 0.2}
    assert judge(GOOD) == ""


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (replace(GOOD, loaded=Run(0.2, (5, 6, 8), 2048)), "tokens differ"),
        (replace(GOOD, warm=Run(0.2, (5, 6), 2048)), "tokens differ"),
        (replace(GOOD, loaded_chunks=0), "loaded nothing"),
    ],
)
def test_anything_else_is_a_failure(outcome: Outcome, words: str) -> None:
    assert words in judge(outcome)


def test_picture_is_written(tmp_path: Path) -> None:
    draw(GOOD.ttft_s, 2048, tmp_path / "demo.png")

    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
