# SPDX-License-Identifier: Apache-2.0
"""From a server's numbers to words."""

from pathlib import Path
from typing import Any

import pytest

from kvpool.cli.numbers import Numbers
from kvpool.cli.verdict import VerdictKind, judge

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def numbers(**changes: Any) -> Numbers:
    """A ready server with one engine that asked for something, found nothing, and stored nothing."""
    base = {"ready": True, "draining": False, "clients": 1, "chunk_tokens": 256, "chunks": 0, "lookup_tokens": 2560}
    return Numbers(**{**base, "lookups": {"missing": 10}, **changes})


CASES = [
    ("draining", numbers(draining=True, ready=False), "shutting down"),
    ("starting", numbers(ready=False), "starting"),
    ("no-client", numbers(lookups={}, clients=0), "no engine is connected"),
    ("no-request", numbers(lookups={}), "not asked"),
    ("no-lookup", numbers(lookups={}, stored=3, chunks=3), "role"),
    ("no-lookup", numbers(lookups={}, present=3, chunks=3), "role"),
    ("prompts-short", numbers(lookups={"short": 4, "ended": 1}, lookup_tokens=0), "256 tokens"),
    ("pin-limit", numbers(lookups={"pin_limit": 1, "missing": 9}, chunks=9, stored=9), "limits.pinned_share"),
    ("other-layout", numbers(lookups={"other_layout": 1, "missing": 9}, chunks=9, stored=9), "layout"),
    ("incomplete", numbers(lookups={"incomplete": 10}, chunks=9, stored=9), "every worker"),
    ("stores-skipped", numbers(skipped={"full": 5, "pinned": 2}), "raise l1.size_bytes"),
    ("stores-skipped", numbers(skipped={"pinned": 5}), "limits.pinned_share"),
    ("nothing-stored", numbers(), "nothing is stored"),
    ("nothing-stored", numbers(stored=5), "nothing is stored"),
    ("evicted-first", numbers(stored=90, chunks=10, evicted=80), "raise l1.size_bytes"),
    ("no-shared-prefix", numbers(stored=90, chunks=85, evicted=5), "no prefix"),
    ("hits", numbers(stored=9, chunks=9, hit_tokens=1280), "50.0%"),
    ("hits", numbers(stored=9, chunks=9, hit_tokens=1280, lookups={"pin_limit": 1}), "50.0%"),
]


@pytest.mark.parametrize(("kind", "n", "words"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_verdict_names_the_nearest_cause(kind: str, n: Numbers, words: str) -> None:
    verdict = judge(n)

    assert verdict.kind == kind
    assert words in verdict.text
    assert verdict.good == (kind == "hits")


def test_every_verdict_has_a_case_and_a_line_in_the_operations_page() -> None:
    page = OPERATIONS.read_text()

    assert {c[0] for c in CASES} == set(VerdictKind)
    assert [kind for kind in VerdictKind if f"| `{kind}` |" not in page] == []
