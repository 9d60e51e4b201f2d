# SPDX-License-Identifier: Apache-2.0
"""The connector inside a model of the engine: whatever happens, no wrong byte is read, stored or left held."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.engine_model import EngineModel

BEHAVIOURS = ("R033", "R093", "R103", "R105", "R131", "D001", "D054", "D055", "D057", "D058", "D060", "D064")


@pytest.mark.behaviour(*BEHAVIOURS)
@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), failure_rate=st.sampled_from([0.0, 0.1, 0.9]), blocks=st.integers(20, 40))
def test_nothing_wrong_is_read_stored_or_held(depth: int, seed: int, failure_rate: float, blocks: int) -> None:
    engine = EngineModel(seed, depth=depth, failure_rate=failure_rate, blocks=blocks)
    for _ in range(150):
        engine.act()
    engine.drain()


@pytest.mark.behaviour(*BEHAVIOURS, "R124")
@pytest.mark.parametrize("window", [6, 16, 23])
@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), failure_rate=st.sampled_from([0.0, 0.1, 0.9]), blocks=st.integers(36, 60))
def test_nor_with_a_window_whose_blocks_the_engine_takes_back(
    depth: int, window: int, seed: int, failure_rate: float, blocks: int
) -> None:
    engine = EngineModel(seed, depth=depth, failure_rate=failure_rate, blocks=blocks, window=window)
    for _ in range(150):
        engine.act()
    engine.drain()


@pytest.mark.parametrize("window", [0, 6, 23])
def test_the_model_reaches_what_matters(window: int) -> None:
    """The property above would hold for an engine that never loads; this one does everything, and often."""
    numbers: Counter[str] = Counter()
    for seed in range(50):
        blocks = 50 if window else 26
        engine = EngineModel(seed, depth=1 + seed % 2, failure_rate=0.3, blocks=blocks, window=window)
        for _ in range(200):
            engine.act()
        engine.drain()
        numbers.update(engine.numbers)

    assert all(numbers[name] >= 5 for name in ("loads", "stores", "preempted", "failed")), numbers
    assert numbers["aborted_loads"] >= 1, numbers
