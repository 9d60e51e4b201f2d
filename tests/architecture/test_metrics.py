# SPDX-License-Identifier: Apache-2.0
"""The catalogue and whoever produces numbers agree, in both directions."""

import ast
import re

import pytest
from tests.architecture.source import Module, modules

from kvpool.engine.counters import Counters
from kvpool.metrics.catalogue import CATALOGUE, all_series

PRODUCERS = ("kvpool.engine", "kvpool.server")
NAME = re.compile(r"kvpool_[a-z0-9_]+")


def literals(module: Module) -> set[str]:
    """Metric names in the module's texts that are no docstrings."""
    constants = [n for n in ast.walk(module.tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {name for c in constants if NAME.match(c.value) for name in NAME.findall(c.value)}


def produced() -> dict[str, str]:
    """Metric name to a module that produces it."""
    return {name: m.name for m in modules() if m.dotted.startswith(PRODUCERS) for name in literals(m)}


def test_what_is_produced_is_in_the_catalogue() -> None:
    names = {m.name for m in CATALOGUE}

    assert {name: where for name, where in produced().items() if name not in names} == {}


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_what_is_in_the_catalogue_is_produced(metric) -> None:
    assert metric.name in produced()


def test_every_series_of_the_engine_exists_from_the_start_and_is_in_the_catalogue() -> None:
    series = Counters().snapshot({})

    assert set(series) <= set(all_series())
    assert set(series.values()) == {0.0}
