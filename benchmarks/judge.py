# SPDX-License-Identifier: Apache-2.0
"""Judge a result of `kvpool bench ... --json FILE` by benchmarks/bars.toml.

A figure of what moves bytes counts only if bytes were compared for it. Exit codes: 0 all bars that apply are met, 1 one
is missed or its figure is missing, 2 the result cannot be read.
"""

import argparse
import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["Verdict", "judge", "main"]

BARS: Final = Path(__file__).with_name("bars.toml")


@dataclass(frozen=True)
class Verdict:
    """One bar against one result."""

    bar: str
    state: str
    """met, missed, or skipped."""

    text: str


def judge(result: dict[str, Any], bars: dict[str, dict[str, Any]]) -> list[Verdict]:
    """Compare *result* with the bars of its bench.

    Args:
        result: what `kvpool bench ... --json` wrote.
        bars: the content of bars.toml.
    """
    cells = {cell["name"]: cell for cell in result["cells"]}
    mine = {name: bar for name, bar in bars.items() if bar["bench"] == result["bench"]}
    return [_judge_one(name, bar, cells.get(bar["cell"]), result.get("options", {})) for name, bar in mine.items()]


def _judge_one(name: str, bar: dict[str, Any], cell: dict[str, Any] | None, options: dict[str, Any]) -> Verdict:
    other = {k: options.get(k) for k, v in bar.get("options", {}).items() if options.get(k) != v}
    if other:
        wanted = ", ".join(f"{k} = {bar['options'][k]}" for k in other)
        return Verdict(name, "skipped", f"holds for {wanted}; this run had {', '.join(map(str, other.values()))}")
    if cell is None:
        return Verdict(name, "missed", f"the result has no cell {bar['cell']!r}")
    if cell.get("skipped"):
        return Verdict(name, "missed", f"not measured: {cell['skipped']}")
    if bar.get("moves_bytes", True) and not cell.get("compared_bytes"):
        return Verdict(name, "missed", "no bytes were compared, so the number says nothing")
    return _compare(name, bar, cell)


def _compare(name: str, bar: dict[str, Any], cell: dict[str, Any]) -> Verdict:
    figure = cell["value"] if bar["figure"] == "value" else (cell.get("spread") or {}).get(bar["figure"])
    if figure is None or cell["unit"] != bar["unit"]:
        return Verdict(name, "missed", f"no {bar['figure']} in {bar['unit']}")
    most, least = bar.get("at_most"), bar.get("at_least")
    good = figure <= most if most is not None else figure >= least
    target = f"at most {most:g}" if most is not None else f"at least {least:g}"
    return Verdict(name, "met" if good else "missed", f"{figure:.4g} {bar['unit']}, {target}: {bar['why']}")


def main(argv: list[str] | None = None) -> int:
    """Judge one file and print a line for each bar."""
    parser = argparse.ArgumentParser(description="Judge a benchmark's result by bars.toml.", allow_abbrev=False)
    parser.add_argument("result", metavar="RESULT.json", type=Path)
    args = parser.parse_args(argv)
    try:
        verdicts = judge(json.loads(args.result.read_text()), tomllib.loads(BARS.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as e:
        print(f"judge: {args.result}: no result of kvpool bench ({e!r})", file=sys.stderr)
        return 2
    for v in verdicts:
        print(f"{v.state:8}{v.bar:24}{v.text}")
    missed = sum(v.state == "missed" for v in verdicts)
    print(f"{len(verdicts)} bars: {sum(v.state == 'met' for v in verdicts)} met, {missed} missed")
    return 1 if missed or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
