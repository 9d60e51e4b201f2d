# SPDX-License-Identifier: Apache-2.0
"""Watches that end are started again, until they keep failing."""

import asyncio
from collections.abc import Callable

import pytest

from kvpool_operator.settings import Settings
from kvpool_operator.supervise import KeepsFailingError, supervise


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.rests: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now_s += seconds


def failing(times: int, clock: Clock, lasts_s: float) -> Callable[[], object]:
    left = [times]

    async def run() -> None:
        clock.now_s += lasts_s
        if left[0]:
            left[0] -= 1
            raise ConnectionError("the stream broke")

    return run


def test_a_clean_end_ends() -> None:
    clock = Clock()
    asyncio.run(supervise(failing(0, clock, 1.0), lambda _: None, clock, clock.rest))  # type: ignore[arg-type]

    assert clock.rests == []


def test_failures_are_told_and_followed_by_growing_rests() -> None:
    clock, told = Clock(), list[BaseException]()
    asyncio.run(supervise(failing(4, clock, 1.0), told.append, clock, clock.rest))  # type: ignore[arg-type]

    assert clock.rests == [1.0, 2.0, 4.0, 8.0]
    assert len(told) == 4


def test_five_failures_within_ten_minutes_end_it() -> None:
    clock = Clock()
    with pytest.raises(KeepsFailingError):
        asyncio.run(supervise(failing(5, clock, 60.0), lambda _: None, clock, clock.rest))  # type: ignore[arg-type]


def test_failures_far_apart_are_lived_with() -> None:
    clock = Clock()
    asyncio.run(supervise(failing(40, clock, 300.0), lambda _: None, clock, clock.rest))  # type: ignore[arg-type]

    assert len(clock.rests) == 40


def test_settings_come_from_the_environment() -> None:
    read = Settings.read(
        {"KVPOOL_OPERATOR_WATCH_NAMESPACES": "a, b", "KVPOOL_OPERATOR_PARALLEL": "8", "KVPOOL_OPERATOR_LEASE_S": "5"}
    )

    assert (read.watch_namespaces, read.parallel, read.lease_s) == (("a", "b"), 8, 5.0)
    assert Settings.read({}) == Settings()
    with pytest.raises(ValueError, match="KVPOOL_OPERATOR_PARALLEL"):
        Settings.read({"KVPOOL_OPERATOR_PARALLEL": "many"})
