# SPDX-License-Identifier: Apache-2.0
"""Totals become increases; ranks add up; a gauge is told until it is 0."""

import pytest

from kvpool.connector import statistics
from kvpool.connector.statistics import COUNTERS, Sampler, server_key
from kvpool.model.reasons import UncachedReason


def test_increases_are_told_once() -> None:
    totals = {"loads": 2, "unknown": 5}
    sampler = Sampler("scheduler", lambda: totals, lambda: "")

    assert sampler.sample() == {"counters": {"loads": 2}}
    assert sampler.sample() == {}
    totals["loads"] = 5
    assert sampler.sample() == {"counters": {"loads": 3}}


def test_gauges_are_repeated_until_they_are_gone() -> None:
    totals, reasons = {"loads_in_flight": 1}, ["starting"]
    sampler = Sampler("worker", lambda: totals, lambda: reasons[0])

    assert sampler.sample()["gauges"] == {"loads_in_flight": 1, "uncached:worker:starting": 1.0}
    assert sampler.sample()["gauges"] == {"loads_in_flight": 1, "uncached:worker:starting": 1.0}
    totals["loads_in_flight"], reasons[0] = 0, "unreachable"
    assert sampler.sample()["gauges"] == {
        "loads_in_flight": 0,
        "uncached:worker:starting": 0,
        "uncached:worker:unreachable": 1.0,
    }
    reasons[0] = ""
    assert sampler.sample()["gauges"] == {"uncached:worker:unreachable": 0}
    assert sampler.sample() == {}


def test_ranks_add_up() -> None:
    one = {"counters": {"loads": 1, "stores": 2}, "gauges": {"uncached:worker:starting": 1.0}}
    other = {"counters": {"loads": 4}, "gauges": {"uncached:worker:starting": 0.0, "loads_in_flight": 2}}

    merged = statistics.merge(one, other)

    assert merged["counters"] == {"loads": 5, "stores": 2}
    assert merged["gauges"] == {"uncached:worker:starting": 1.0, "loads_in_flight": 2}
    assert statistics.merge(other, one)["gauges"]["uncached:worker:starting"] == 1.0
    assert statistics.reduce(merged) == {"kvpool_loads": 5, "kvpool_stores": 2}
    assert not statistics.is_empty(merged)
    assert statistics.is_empty({})


def test_names_are_the_engines_kind() -> None:
    names = [row.name for row in COUNTERS.values()]

    assert len(set(names)) == len(names)
    assert all(name.startswith("kvpool_") and not name.endswith("_total") for name in names)


@pytest.mark.behaviour("R116")
def test_each_server_always_has_one_state() -> None:
    states = {"tcp://a:1": None, "ipc:///b": UncachedReason.UNREACHABLE}
    sampler = Sampler("scheduler", lambda: {server_key(s, r): 1.0 for s, r in states.items()}, lambda: "")
    assert sampler.sample() == {"gauges": {"server:tcp://a:1:up": 1.0, "server:ipc:///b:unreachable": 1.0}}

    states["ipc:///b"] = None

    assert sampler.sample() == {"gauges": {"server:ipc:///b:unreachable": 0.0, "server:ipc:///b:up": 1.0}}
    assert sampler.sample() == {}, "not in every step"
