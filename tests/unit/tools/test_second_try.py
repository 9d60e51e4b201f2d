# SPDX-License-Identifier: Apache-2.0
"""The second try of failed tests, with real pytest runs."""

import subprocess
import sys
from textwrap import dedent

import pytest
from tools.second_try import MOST, run

UNSTEADY = """
from pathlib import Path
def test_passes_the_second_time():
    mark = Path({mark!r})
    first = not mark.exists()
    mark.touch()
    assert not first
def test_passes():
    with open({count!r}, "a") as f:
        f.write("x")
"""


@pytest.fixture
def attempt(tmp_path, capfd):
    """Run the tests of a text; returns the exit status and what was printed."""

    def pytest_run(arguments):
        command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "--rootdir", str(tmp_path), *arguments]
        return subprocess.run(command, cwd=tmp_path, check=False, timeout=60).returncode

    def of(text: str):
        (tmp_path / "test_it.py").write_text(dedent(text))
        return run([str(tmp_path / "test_it.py"), "-q"], pytest_run), capfd.readouterr().out

    return of


def test_an_unsteady_test_passes_and_is_named_and_the_others_are_not_run_again(attempt, tmp_path):
    status, out = attempt(UNSTEADY.format(mark=str(tmp_path / "mark"), count=str(tmp_path / "count")))

    assert status == 0
    assert "unsteady: test_it.py::test_passes_the_second_time" in out
    assert (tmp_path / "count").read_text() == "x"


def test_what_fails_twice_fails(attempt):
    status, out = attempt("def test_bad(): assert False")

    assert status == 1
    assert "failed in the first try: test_it.py::test_bad" in out


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("".join(f"def test_{n}(): assert False\n" for n in range(MOST + 1)), 1),
        ("import nothing_of_this_name", 2),
    ],
    ids=["many failures", "collection"],
)
def test_nothing_is_tried_again_when_it_is_no_accident(attempt, text, status):
    found, out = attempt(text)

    assert found == status
    assert "second try" not in out


def test_what_passes_runs_once(attempt, tmp_path):
    text = UNSTEADY.format(mark=str(tmp_path / "mark"), count=str(tmp_path / "count"))
    (tmp_path / "mark").touch()

    status, out = attempt(text)

    assert (status, (tmp_path / "count").read_text()) == (0, "x")
    assert "second try" not in out
