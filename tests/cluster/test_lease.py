# SPDX-License-Identifier: Apache-2.0
"""The Lease on a real API server, with a clock that the test moves."""

import asyncio
import datetime as dt

import pytest
from tests.cluster.conftest import Caller

from kvpool_operator.cluster import LEASES
from kvpool_operator.lease import LEASE, Lease, LeaseLostError

pytestmark = pytest.mark.cluster

LEASE_S = 0.4


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def candidate(api: Caller, namespace: str, name: str, clock: Clock) -> Lease:
    def wall() -> dt.datetime:
        return dt.datetime(2030, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=clock())

    return Lease(api.cluster, namespace, name, LEASE_S, clock, wall)


def stored(api: Caller, namespace: str) -> dict[str, object]:
    spec: dict[str, object] = api(api.cluster.get(LEASES, namespace, LEASE))["spec"]
    return spec


def test_the_first_takes_it_the_second_does_not(api: Caller, namespace: str) -> None:
    clock = Clock()
    one, two = (candidate(api, namespace, n, clock) for n in ("one", "two"))

    api(one.acquire())
    assert not api(two._try())

    assert (one.held, two.held) == (True, False)
    assert stored(api, namespace)["holderIdentity"] == "one"


def test_a_record_that_stands_still_is_nobodys_by_the_watchers_own_clock(api: Caller, namespace: str) -> None:
    clock = Clock()
    one, two = (candidate(api, namespace, n, clock) for n in ("one", "two"))
    api(one.acquire())
    assert not api(two._try())
    clock.now_s += LEASE_S * 0.9
    assert api(one._try()), "renewed"
    clock.now_s += LEASE_S * 0.9
    assert not api(two._try()), "its record has changed since"

    clock.now_s += LEASE_S * 1.1
    assert api(two._try())

    assert stored(api, namespace)["holderIdentity"] == "two"
    assert stored(api, namespace)["leaseTransitions"] == 1


def test_a_holder_that_was_replaced_learns_it(api: Caller, namespace: str) -> None:
    clock = Clock()
    one, two = (candidate(api, namespace, n, clock) for n in ("one", "two"))
    api(one.acquire())
    api(two._try())
    clock.now_s += LEASE_S * 1.1
    assert api(two._try())

    with pytest.raises(LeaseLostError):
        api(one.keep())
    assert not one.held


def test_of_two_writers_one_wins(api: Caller, namespace: str) -> None:
    clock = Clock()
    one, two, three = (candidate(api, namespace, n, clock) for n in ("one", "two", "three"))
    api(one.acquire())
    for other in (two, three):
        api(other._try())
    clock.now_s += LEASE_S * 1.1

    async def race() -> list[bool]:
        return list(await asyncio.gather(two._try(), three._try()))

    assert sum(api(race())) == 1
    assert (two.held, three.held).count(True) == 1


def test_a_released_lease_is_free_at_once(api: Caller, namespace: str) -> None:
    clock = Clock()
    one, two = (candidate(api, namespace, n, clock) for n in ("one", "two"))
    api(one.acquire())

    api(one.release())

    assert api(two._try())
    api(one.release())
    assert stored(api, namespace)["holderIdentity"] == "two", "what is not held is not released"
