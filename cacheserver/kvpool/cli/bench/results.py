# SPDX-License-Identifier: Apache-2.0
"""Results of the bench: percentiles, the table, the JSON. A number without compared bytes is not printed. Pure."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from kvpool.cli.errors import Failure

__all__ = ["BenchReport", "Cell", "Spread", "Timings", "spread", "table"]

FORMAT: Final = 1


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How repeated measurements of one thing lie."""

    count: int
    p50: float
    p90: float
    p99: float
    least: float
    most: float


Timings = Sequence[float]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One measured thing, or the reason why it was not measured."""

    name: str
    what: str
    unit: str
    value: float | None = None
    """The number that a bar judges: the median of *spread* where there is one."""

    spread: Spread | None = None
    compared_bytes: int = 0
    """Bytes that came back from the server and were compared with what they must be."""

    skipped: str = ""
    """Why there is no number."""

    details: dict[str, float] = {}


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What --json writes."""

    format: int = FORMAT
    bench: str
    cells: tuple[Cell, ...]
    options: dict[str, Any]
    machine: dict[str, Any]


def spread(samples: Timings) -> Spread:
    """Return the percentiles of *samples*, at least one."""
    values = np.asarray(samples, float)
    p50, p90, p99 = (float(v) for v in np.percentile(values, (50, 90, 99)))
    return Spread(count=len(values), p50=p50, p90=p90, p99=p99, least=float(values.min()), most=float(values.max()))


def table(cells: Sequence[Cell]) -> str:
    """Return the cells as text, one line each.

    Raises:
        Failure: a cell has a number but no bytes were compared for it.
    """
    for cell in cells:
        if cell.value is not None and not cell.compared_bytes:
            raise Failure(
                f"{cell.name}: no bytes were compared, so its number is not printed; this is a defect of the bench"
            )
    rows = [("cell", "p50", "p90", "p99", "unit", "n", "compared", "what"), *(_row(c) for c in cells)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*(t.ljust(w) for t, w in zip(r, widths, strict=False)), r[-1]]).rstrip() for r in rows)


def _row(c: Cell) -> tuple[str, ...]:
    if c.value is None:
        return (c.name, "-", "-", "-", c.unit, "0", "-", f"not measured: {c.skipped}")
    compared = f"{c.compared_bytes / 2**20:.1f} MiB"
    if c.spread is None:
        return (c.name, _short(c.value), "-", "-", c.unit, "1", compared, c.what)
    s = c.spread
    return (c.name, _short(s.p50), _short(s.p90), _short(s.p99), c.unit, str(s.count), compared, c.what)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits
