# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that writes which test carries which ``behaviour`` numbers; tools/behaviours.py uses it."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

__all__ = ["pytest_addoption", "pytest_collection_finish"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.addoption("--behaviour-marks", metavar="FILE", help="write the behaviour marks of all tests as JSON")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write number to test names; the cases of one parametrized test count once."""
    target = session.config.getoption("behaviour_marks")
    if not target:
        return
    found: defaultdict[str, set[str]] = defaultdict(set)
    for item in session.items:
        for mark in item.iter_markers("behaviour"):
            for number in mark.args:
                found[str(number)].add(item.nodeid.partition("[")[0])
    Path(target).write_text(json.dumps({number: sorted(tests) for number, tests in sorted(found.items())}))
