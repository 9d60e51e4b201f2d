# SPDX-License-Identifier: Apache-2.0
"""What the engine relies on in every tier."""

import pytest
from tests.contract.tiers import FACTORIES, Factory

from kvpool.engine.ports import TierKey
from kvpool.model.checksum import ChecksumKind, checksum

HELD = TierKey(bytes(32), bytes([1]) * 32, 0, 0)
OTHER = TierKey(bytes(32), bytes([1]) * 32, 0, 1)
DATA = b"chunk" * 100


@pytest.fixture(params=FACTORIES)
def factory(request: pytest.FixtureRequest) -> Factory:
    return FACTORIES[request.param]


def test_says_what_it_holds_by_every_part_of_the_key(factory: Factory) -> None:
    tier = factory.make({HELD: DATA})

    assert tier.holds([OTHER, HELD]) == [False, True]
    assert tier.holds([]) == []


def test_brings_the_bytes_with_a_checksum_that_fits(factory: Factory) -> None:
    tier, target = factory.make({HELD: DATA}), bytearray(len(DATA))

    tier.fetch(7, HELD, memoryview(target))
    factory.run(tier)

    (done,) = tier.done()
    assert (done.fetch_id, done.length, bytes(target)) == (7, len(DATA), DATA)
    assert done.checksum == checksum(DATA, ChecksumKind(done.checksum_kind))


def test_every_fetch_ends_exactly_once(factory: Factory) -> None:
    tier = factory.make({HELD: DATA})
    for fetch_id in range(5):
        tier.fetch(fetch_id, HELD if fetch_id % 2 else OTHER, memoryview(bytearray(len(DATA))))
    factory.run(tier)

    ended = [*tier.done(), *tier.done()]

    assert sorted(done.fetch_id for done in ended) == list(range(5))


def test_a_key_that_is_not_there_ends_as_a_miss(factory: Factory) -> None:
    tier, target = factory.make({HELD: DATA}), bytearray(len(DATA))

    tier.fetch(1, OTHER, memoryview(target))
    factory.run(tier)

    assert [done.length for done in tier.done()] == [0]


def test_bytes_that_do_not_fit_end_as_a_miss(factory: Factory) -> None:
    tier, target = factory.make({HELD: DATA}), bytearray(len(DATA) - 1)

    tier.fetch(1, HELD, memoryview(target))
    factory.run(tier)

    assert [done.length for done in tier.done()] == [0]


def test_wakes_whoever_waits(factory: Factory) -> None:
    tier, woken = factory.make({HELD: DATA}), []
    tier.on_done(lambda: woken.append(True))

    tier.fetch(1, HELD, memoryview(bytearray(len(DATA))))
    factory.run(tier)

    assert woken
