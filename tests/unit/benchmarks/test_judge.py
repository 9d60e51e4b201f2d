# SPDX-License-Identifier: Apache-2.0
import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.judge import BARS, judge, main

from kvpool.cli.bench.results import BenchReport, Cell, spread

FULL = {"tokens": 131072, "clients": 3, "restart_bytes": 8 << 30}


def cell(name: str, samples: list[float], unit: str, compared: int = 1) -> Cell:
    s = spread(samples)
    return Cell(name=name, what="", unit=unit, value=s.p50, spread=s, compared_bytes=compared)


def control(*changed: Cell, options: dict[str, Any] = FULL) -> BenchReport:
    """A result that meets every bar, but for *changed* cells."""
    good = {
        "lookup": cell("lookup", [0.5], "ms"),
        "lookup-first-sight": cell("lookup-first-sight", [1.5], "ms"),
        "ping-under-load": cell("ping-under-load", [0.3], "ms"),
        "metadata": Cell(name="metadata", what="", unit="B/chunk", value=300.0, compared_bytes=1),
        "restart-kill": cell("restart-kill", [0.7], "s"),
        "restart-term": cell("restart-term", [0.7], "s"),
        "client-killed": cell("client-killed", [100.0], "ms"),
    }
    cells = good | {c.name: c for c in changed}
    return BenchReport(bench="control", cells=tuple(cells.values()), options=options, machine={})


def states(report: BenchReport) -> dict[str, str]:
    bars = tomllib.loads(BARS.read_text())
    return {v.bar: v.state for v in judge(msgspec.to_builtins(report), bars)}


def test_a_good_run_meets_every_bar_of_its_bench() -> None:
    assert set(states(control()).values()) == {"met"}
    assert "engine-no-reuse" not in states(control())


@pytest.mark.parametrize(
    ("changed", "bar"),
    [
        (cell("lookup", [1.1], "ms"), "lookup-p50"),
        (cell("lookup", [0.1] * 90 + [9.0] * 10, "ms"), "lookup-p99"),
        (cell("lookup", [0.5], "ms", compared=0), "lookup-p50"),
        (cell("lookup", [0.0005], "s"), "lookup-p50"),
        (cell("client-killed", [1.0, 5001.0], "ms"), "client-killed"),
        (Cell(name="metadata", what="", unit="B/chunk", skipped="no own server"), "metadata"),
    ],
)
def test_a_bar_is_missed(changed: Cell, bar: str) -> None:
    assert states(control(changed))[bar] == "missed"


def test_other_options_skip_the_bar_and_say_so() -> None:
    found = states(control(options=FULL | {"tokens": 4096}))

    assert found["lookup-p50"] == "skipped"
    assert found["client-killed"] == "met"


def test_a_missing_cell_is_a_missed_bar() -> None:
    report = control()
    without = msgspec.structs.replace(report, cells=tuple(c for c in report.cells if c.name != "metadata"))

    assert states(without)["metadata"] == "missed"


@pytest.mark.parametrize(("changed", "code"), [((), 0), ((cell("lookup", [50.0], "ms"),), 1)])
def test_the_command_exits_by_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: tuple[Cell, ...], code: int
) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(msgspec.json.encode(control(*changed)))

    assert main([str(path)]) == code
    assert "lookup-p50" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"bench": "control", "cells": [{}]}'])
def test_what_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)

    assert main([str(path)]) == 2


def test_every_bar_is_well_formed() -> None:
    for name, bar in tomllib.loads(BARS.read_text()).items():
        assert ("at_most" in bar) != ("at_least" in bar), name
        assert bar["figure"] in ("value", "p50", "p90", "p99", "least", "most"), name
        assert json.dumps(bar["why"]), name


def test_where_no_bytes_move_none_need_be_compared() -> None:
    bars = tomllib.loads(BARS.read_text())
    options = bars["operator-resident"]["options"]
    resident = Cell(name="resident", what="", unit="MiB", value=200.0)
    report = BenchReport(bench="operator", cells=(resident,), options=options, machine={})

    found = {v.bar: v.state for v in judge(msgspec.to_builtins(report), bars)}

    assert found["operator-resident"] == "met"
    assert found["operator-idle"] == "missed", "a cell that is not there"
