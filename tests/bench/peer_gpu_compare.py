# SPDX-License-Identifier: Apache-2.0
"""What `tests/bench/peer_gpu.py` makes of its measurements. Pure."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvpool.cli.bench.results import Cell
from kvpool.cli.errors import Failure

STEADY_S = 0.03
"""Left out at the beginning of a span: what is under way is not yet what it will be."""


class WrongBytes(Failure):
    """Something else came back than was stored: no number of the run counts."""


def busy_rate(rate: Callable[[float, float], float], spans: Sequence[tuple[float, float]]) -> float:
    """Return what was done a second within the spans, each without its first moments.

    Raises:
        Failure: the spans are too short for a rate.
    """
    done = seconds = 0.0
    for began_s, ended_s in spans:
        within = rate(began_s + STEADY_S, ended_s)
        if within:
            done += within * (ended_s - began_s)
            seconds += ended_s - began_s
    if not seconds:
        raise Failure("the products' rate cannot be told: every span is shorter than two of their batches")
    return done / seconds


def compared(theirs: Sequence[Cell], ours: dict[str, Any] | None) -> Iterator[Cell]:
    """Yield our figures of the same name and what they are beside the peer's.

    Args:
        theirs: the peer's cells.
        ours: what `kvpool bench gpu --json` wrote, if it was given.
    """
    mine = {cell["name"]: cell for cell in (ours or {"cells": []})["cells"]}
    for cell in theirs:
        if not cell.name.endswith("-peer") or cell.value is None or cell.unit == "ms":
            continue
        name = cell.name.removesuffix("-peer")
        us = mine.get(name.replace("-hnd", ""))
        figure = None if us is None else us.get("value") if cell.unit == "%" else us.get("details", {}).get("gb_s")
        compared_bytes = min(cell.compared_bytes, us["compared_bytes"]) if us else 0
        for suffix, unit, what, value in beside(cell, figure):
            skipped = "" if value is not None else "no such figure in --ours"
            yield Cell(
                name=name + suffix, what=what, unit=unit, value=value, compared_bytes=compared_bytes, skipped=skipped
            )


def beside(cell: Cell, us: float | None) -> Iterator[tuple[str, str, str, float | None]]:
    """Yield suffix, unit, meaning and value of each comparison of one figure."""
    if cell.unit == "GB/s":
        yield "", "GB/s", "kvpool's", us
        yield "-ratio", "ratio", "kvpool's over the peer's", us and us / cell.value
        return
    yield "", "%", "what Products lose beside kvpool", us
    yield "-more", "points", "lost beside kvpool less lost beside the peer", None if us is None else us - cell.value
    if "-hnd" in cell.name:
        part = None if us is None or cell.value <= 0 else us / cell.value
        yield "-part", "ratio", "lost beside kvpool, of what is lost beside the peer's kernels", part
