# SPDX-License-Identifier: Apache-2.0
"""What the bench beside the peer on a GPU makes of its measurements, and that its bars have a producer."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from benchmarks.judge import BARS
from tests.bench.peer_gpu import ALONE, RUNS, WAYS, parsed
from tests.bench.peer_gpu_compare import busy_rate, compared

from kvpool.cli.bench.results import Cell, table
from kvpool.cli.errors import Failure


def peers(name: str, unit: str, value: float) -> Cell:
    return Cell(name=f"{name}-peer", what="", unit=unit, value=value, compared_bytes=2)


def ours(*cells: tuple[str, float]) -> dict[str, Any]:
    """A report of our bench: a share with GB/s beside it, or a loss."""
    return {
        "cells": [
            {"name": name, "value": value, "compared_bytes": 1, "details": {} if "loss" in name else {"gb_s": value}}
            for name, value in cells
        ]
    }


def values(cells: list[Cell]) -> dict[str, float | None]:
    return {cell.name: cell.value for cell in cells}


def test_rates_are_divided_and_losses_subtracted() -> None:
    theirs = [peers("store-4KiB", "GB/s", 5.0), peers("loss-store-4KiB-products", "%", 1.5)]

    found = [*compared(theirs, ours(("store-4KiB", 50.0), ("loss-store-4KiB-products", 2.0)))]

    assert values(found) == {
        "store-4KiB": 50.0,
        "store-4KiB-ratio": 10.0,
        "loss-store-4KiB-products": 2.0,
        "loss-store-4KiB-products-more": 0.5,
    }
    assert {cell.compared_bytes for cell in found} == {1}
    assert "store-4KiB-ratio" in table(found)


def test_where_the_peer_runs_kernels_our_loss_is_a_part_of_its() -> None:
    theirs = [peers("loss-load-32KiB-hnd-products", "%", 12.0)]

    assert values([*compared(theirs, ours(("loss-load-32KiB-products", 3.0)))])[
        "loss-load-32KiB-hnd-products-part"
    ] == pytest.approx(0.25)


def test_no_loss_of_the_peer_has_no_part() -> None:
    theirs = [peers("loss-load-32KiB-hnd-products", "%", -0.2)]

    found = values([*compared(theirs, ours(("loss-load-32KiB-products", 3.0)))])

    assert found["loss-load-32KiB-hnd-products-part"] is None
    assert found["loss-load-32KiB-hnd-products-more"] == pytest.approx(3.2)


@pytest.mark.parametrize("report", [None, ours(("load-4KiB", 50.0))])
def test_what_ours_lacks_is_not_measured(report: dict[str, Any] | None) -> None:
    (us, ratio) = compared([peers("store-4KiB", "GB/s", 5.0)], report)

    assert us.value is None
    assert ratio.value is None
    assert ratio.skipped


def test_lookups_and_ceilings_stand_alone() -> None:
    ceiling = Cell(name="ceiling-store", what="", unit="GB/s", value=55.0, compared_bytes=1)

    assert not [*compared([peers("lookup-16k-tokens", "ms", 4.0), ceiling], ours())]


def test_the_rate_beside_a_lane_is_weighted_by_the_spans() -> None:
    rates = {0.03: 10.0, 5.03: 40.0, 9.03: 0.0}

    found = busy_rate(lambda began_s, _: rates[round(began_s, 2)], [(0.0, 1.0), (5.0, 8.0), (9.0, 9.02)])

    assert found == pytest.approx((10.0 + 3 * 40.0) / 4)


def test_spans_too_short_for_a_rate_are_no_rate() -> None:
    with pytest.raises(Failure, match="shorter"):
        busy_rate(lambda _, __: 0.0, [(0.0, 0.1)])


def test_every_bar_names_a_cell_that_the_bench_makes() -> None:
    labels = [f"{run // 1024}KiB" for run in RUNS]
    moved = [f"{way}-{label}{busy}" for way in WAYS for label in [*labels, "32KiB-hnd"] for busy in ("", "-products")]
    single = [f"{way}-{n // 1024}k-tokens-{run // 1024}KiB" for way in ("store", "load") for run, n in ALONE]
    theirs = [peers(name, "GB/s", 1.0) for name in [*moved, *single]]
    theirs += [peers(f"loss-{name}", "%", 1.0) for name in moved if name.endswith("-products")]
    made = {(cell.name, cell.unit) for cell in compared(theirs, None)}

    bars = [bar for bar in tomllib.loads(BARS.read_text()).values() if bar["bench"] == "peer-gpu"]

    assert len(bars) > 20
    assert {(bar["cell"], bar["unit"]) for bar in bars} <= made


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--cells", "idle,busy"], "no cell is called busy"),
        (["--l1", "4"], "does not evict"),
        (["--ours", "nowhere.json"], "kvpool bench gpu --json"),
    ],
)
def test_bad_options_are_named(given: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        parsed(["--site", str(tmp_path), *given])

    assert said in capsys.readouterr().err
