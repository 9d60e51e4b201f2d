# SPDX-License-Identifier: Apache-2.0
"""Waits of the tests on a device: they end, and say what was there instead."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.gpu import children, waiting
from tests.gpu.children import Child
from tests.gpu.waiting import holders, until

ENGINE = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    if line == "hang\\n":
        sys.stdin.read()
    if line == "end\\n":
        print("x" * 200000, "sad words", file=sys.stderr)
        sys.exit(3)
    print(line, end="", flush=True)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    (tmp_path / "engine.py").write_text(ENGINE)
    monkeypatch.setattr(children, "CHILD", str(tmp_path / "engine.py"))
    monkeypatch.setattr(children, "PATIENCE_S", 0.3)
    return Child(SimpleNamespace(address="", log="what the server logged"), 1)


def test_a_wait_ends_with_what_was_there() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"not within 0.02 s; there is: 2 movers"):
        until(lambda: False, told=lambda: "2 movers", timeout_s=0.02)


def test_a_wait_returns_what_it_waited_for() -> None:
    numbers = iter((0, 0, 7))

    assert until(lambda: next(numbers), told=lambda: "nothing") == 7


def test_an_engine_says_and_does(child: Child) -> None:
    child.says("ready")
    child.does("turns 3")
    child.begins("a")
    child.begins("b")
    assert [child.hears(), child.hears()] == ["a", "b"]
    assert child.ends() == 0


def test_an_engine_that_says_nothing_is_not_waited_for_for_ever(child: Child) -> None:
    child.says("ready")
    child.begins("hang")

    with pytest.raises(pytest.fail.Exception, match=r"(?s)said nothing for 0.3 s.*what the server logged"):
        child.hears(0.3)

    assert child.process.poll() is not None


def test_the_last_words_of_an_engine_are_shown(child: Child) -> None:
    child.says("ready")
    child.begins("end")

    with pytest.raises(pytest.fail.Exception, match=r"(?s)'' instead of 'end'; its exit code: 3.*sad words"):
        child.says("end")


def test_an_engine_that_does_not_end_is_killed(child: Child) -> None:
    child.says("ready")
    child.begins("hang")
    child.process.stdin.close = lambda: None

    with pytest.raises(pytest.fail.Exception, match=r"did not end within 0.3 s"):
        child.ends()


def test_processes_that_have_a_device_are_listed(tmp_path: Path) -> None:
    for number, opened in ((11, "/dev/nvidia-uvm"), (12, "/dev/nvidiactl"), (os.getpid(), "/dev/nvidia-uvm")):
        (tmp_path / str(number) / "fd").mkdir(parents=True)
        (tmp_path / str(number) / "fd" / "3").symlink_to(opened)
        (tmp_path / str(number) / "cmdline").write_bytes(b"python3\0bench\0")
    (tmp_path / "13").mkdir()

    assert holders(tmp_path) == {11: "python3 bench"}


def test_what_was_left_over_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([{1: "python3 bench", 2: "daemon"}, {1: "python3 bench", 3: "python3 stays"}])
    last = {3: "python3 stays", 2: "daemon"}
    calls: list[int] = []

    def holders() -> dict[int, str]:
        calls.append(1)
        return next(seen, last)

    monkeypatch.setattr(waiting, "holders", holders)
    monkeypatch.setattr(waiting, "_STAYING", set())

    waiting.left_over(0.1)
    assert len(calls) > 3
    calls.clear()
    waiting.left_over(60.0)
    assert len(calls) == 1
