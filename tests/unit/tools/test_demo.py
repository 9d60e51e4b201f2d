# SPDX-License-Identifier: Apache-2.0
"""What the demo calls a success, its picture, and how acts that fail or cannot be played end it."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tools.demo import Act, main
from tools.demo_act import ActSkipped
from tools.demo_cache import Outcome, Run, judge
from tools.demo_picture import draw

from kvpool.cli.errors import Failure

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


def skipped(_: argparse.Namespace) -> str:
    raise ActSkipped("there is no Go")


def failed(_: argparse.Namespace) -> str:
    raise Failure("it did not start")


@pytest.mark.parametrize(
    ("plays", "status", "words"),
    [
        ((lambda _: "", lambda _: ""), 0, []),
        ((skipped, lambda _: ""), 0, ["skipped: there is no Go"]),
        ((failed, lambda _: ""), 1, ["one: FAILED: it did not start"]),
        ((lambda _: "tokens differ", skipped), 1, ["one: FAILED: tokens differ", "skipped: there is no Go"]),
    ],
)
def test_every_act_is_played_and_says_in_one_line_why_it_was_not(
    plays: tuple[Callable[[argparse.Namespace], str], ...],
    status: int,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    acts = [Act(name, f"act {name}", play) for name, play in zip(("one", "two"), plays, strict=True)]

    assert main(["--out", str(tmp_path / "new")], acts) == status

    said = capsys.readouterr()
    assert ["act one" in said.out, "act two" in said.out] == [True, True]
    assert all(w in said.out + said.err for w in words)


def test_one_act_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acts = [Act("one", "act one", failed), Act("two", "act two", lambda _: "")]

    assert main(["--out", str(tmp_path), "--only", "two"], acts) == 0
    assert "act one" not in capsys.readouterr().out
