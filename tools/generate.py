# SPDX-License-Identifier: Apache-2.0
"""Write every derived file, or with --check say which ones are stale: ``python -m tools.generate [--check]``."""

import argparse
import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools import behaviours, chart, configuration

from kvpool.cli import docs as cli_docs
from kvpool.metrics import generate as metrics_docs
from kvpool_operator import crd
from kvpool_operator import metrics as operator_metrics

__all__ = ["PAGES", "Page", "main"]

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
DIFF_LINES = 40


@dataclass(frozen=True)
class Page:
    """One derived file."""

    path: Path
    render: Callable[[], str]
    slow: bool = False
    """True if rendering runs other programs."""


PAGES = (
    Page(REFERENCE / "metrics.md", metrics_docs.reference),
    Page(REFERENCE / "operator-metrics.md", operator_metrics.reference),
    Page(REFERENCE / "configuration.md", configuration.render),
    Page(REFERENCE / "cli.md", cli_docs.render),
    Page(ROOT / "crds" / "kvcachepools.yaml", crd.render),
    Page(chart.CRD_TEMPLATE, chart.crd_template),
    Page(chart.DEPLOY, chart.deploy),
    Page(REFERENCE / "behaviours.md", behaviours.render, slow=True),
)


def main() -> int:
    """Return 0 if all is well: with --check, that no page is stale; without it, that all could be written."""
    parser = argparse.ArgumentParser(description="Write every derived file.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is stale, and show how")
    check = parser.parse_args().check
    good = [_check(page) if check else _write(page) for page in PAGES]
    problems = behaviours.problems()
    for problem in problems:
        print(f"docs/reference/behaviours.toml: {problem}", file=sys.stderr)
    return 0 if all(good) and not problems else 1


def _write(page: Page) -> bool:
    page.path.write_text(page.render())
    return True


def _check(page: Page) -> bool:
    have = page.path.read_text() if page.path.exists() else ""
    want = page.render()
    name = str(page.path.relative_to(ROOT))
    if have != want:
        diff = difflib.unified_diff(have.splitlines(), want.splitlines(), name, "as generated", lineterm="")
        print("\n".join([*list(diff)[:DIFF_LINES], f"{name} is stale; run `make generate`"]), file=sys.stderr)
    return have == want


if __name__ == "__main__":
    sys.exit(main())
