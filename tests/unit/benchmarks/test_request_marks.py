# SPDX-License-Identifier: Apache-2.0
"""Marks of the steps of a request: what is watched exists, processes write it down, medians are of requests alone."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.bench.request_marks import MARKS, Mark, read, requests, shown

PROGRAM = """
from kvpool.client.call import Call
from kvpool.wire.messages import Ping, Pong
Call(Ping(), (), 0.0).finish(Pong(), ())
"""


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("KVPOOL_MARKS", raising=False)
    spec = importlib.util.spec_from_file_location("marks", MARKS / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_that_is_watched_exists(watching: ModuleType) -> None:
    for name, steps in watching.STEPS.items():
        module = importlib.import_module(name)
        for step in steps:
            assert callable(getattr(getattr(module, step.owner), step.method)), step


def test_a_process_writes_down_what_it_did(tmp_path: Path) -> None:
    path = os.pathsep.join([str(MARKS), *sys.path])
    environ = os.environ | {"KVPOOL_MARKS": str(tmp_path), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environ, timeout=60)

    marks = read(tmp_path)

    assert [(mark.who, mark.step) for mark in marks] == [("client", "reply Pong <"), ("client", "reply Pong >")]
    assert marks[0].at_s <= marks[1].at_s


def request(at_s: float, kind: str, answered_s: float) -> list[Mark]:
    return [
        Mark(at_s, "client", "call <"),
        Mark(at_s + 0.001, "client", f"send {kind} <"),
        Mark(at_s + answered_s, "server", "serve <"),
        Mark(at_s + 0.004, "client", "ask <"),
        Mark(at_s + 0.006, "client", "ask <"),
        Mark(at_s + 0.007, "client", "end >"),
        Mark(at_s + 0.008, "client", "told >"),
    ]


def test_medians_are_of_the_last_requests_that_were_alone() -> None:
    marks = [mark for n in range(-30, 0) for mark in request(n, "PrepareStore", 0.005)]
    marks += [mark for n in range(12) for mark in request(n, "PrepareStore", 0.002 if n % 3 else 0.003)]
    marks += request(20.0, "PrepareStore", 0.9) + request(20.002, "PrepareStore", 0.9)

    assert len([*requests(sorted(marks))]) == 42
    assert [*shown(sorted(marks))] == [
        "store of 2 slots, median of the last 12, ms from the call",
        "      0.000  client: call <",
        "      1.000  client: send PrepareStore <",
        "      2.000  server: serve <",
        "      4.000  client: ask <",
        "      6.000  client: ask < (last of 2)",
        "      7.000  client: end >",
        "      8.000  client: told >",
    ]


def test_too_few_requests_are_not_shown() -> None:
    assert [*shown([mark for n in range(3) for mark in request(n, "PrepareRetrieve", 0.002)])] == []
