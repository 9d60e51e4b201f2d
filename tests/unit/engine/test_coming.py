# SPDX-License-Identifier: Apache-2.0
"""Lookups that wait for chunks which another client or a tier still brings."""

import pytest
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, digests, engine, namespace
from tests.fakes.tier import FakeTier
from tests.property.engine_checks import check

from kvpool.engine.engine import Engine
from kvpool.engine.ports import TierKey
from kvpool.model.errors import UnknownLease
from kvpool.model.identity import GroupKind, GroupSpec, Mode
from kvpool.model.keys import scope_digest
from kvpool.model.reasons import LookupReason
from kvpool.model.slots import Disposition

ALL = 1 << 31


@pytest.fixture
def other(eng: Engine, arena: MemoryArena) -> FakeClient:
    return FakeClient(eng, arena).join()


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


def hold(tier: FakeTier, *numbers: int, data: bytes = b"t" * PAGE, shard: int = 0) -> list[TierKey]:
    scope = scope_digest("t", namespace())
    keys = [TierKey(scope, digests(n), 0, shard) for n in numbers]
    tier.kept.update(dict.fromkeys(keys, data))
    return keys


@pytest.mark.behaviour("D109")
def test_chunks_under_way_are_coming_and_then_found(eng: Engine, client: FakeClient, other: FakeClient) -> None:
    client.store(digests(0))
    store_id, rows = client.prepare(digests(1, 2), first=1)
    lookup_id, found = other.lookup(digests(0, 1, 2, 3))
    assert (found.chunks, found.coming) == (1, 2)
    assert eng.take_resolved() == []

    client.commit(store_id, rows)

    assert eng.take_resolved() == [lookup_id]
    found = eng.lookup_status(other.client_id, lookup_id, 0.0)
    assert (found.chunks, found.coming, found.reason) == (3, 0, LookupReason.MISSING)
    assert eng.numbers().pinned_bytes == 3 * PAGE
    assert other.vouch(lookup_id, 0, 3) == [Disposition.VOUCHED] * 3


def test_a_complete_answer_says_so(eng: Engine, client: FakeClient, other: FakeClient) -> None:
    store_id, rows = client.prepare(digests(0))
    lookup_id, _ = other.lookup(digests(0))

    client.commit(store_id, rows)

    assert eng.lookup_status(other.client_id, lookup_id, 0.0).reason is LookupReason.ALL


def test_the_answer_grows_step_by_step(eng: Engine, client: FakeClient, other: FakeClient) -> None:
    first, rows = client.prepare(digests(0))
    second, more = client.prepare(digests(1), first=1)
    lookup_id, found = other.lookup(digests(0, 1))
    assert (found.chunks, found.coming) == (0, 2)

    client.commit(second, more)
    status = eng.lookup_status(other.client_id, lookup_id, 0.0)
    assert (status.chunks, status.coming) == (0, 2)
    client.commit(first, rows)

    status = eng.lookup_status(other.client_id, lookup_id, 0.0)
    assert (status.chunks, status.coming) == (2, 0)


def test_what_fails_is_coming_no_more(eng: Engine, client: FakeClient, other: FakeClient) -> None:
    client.store(digests(0))
    store_id, _ = client.prepare(digests(1, 2), first=1)
    lookup_id, _ = other.lookup(digests(0, 1, 2))

    eng.commit_store(client.client_id, store_id, bytes([0, 1]), b"", 0, 0.0)

    found = eng.lookup_status(other.client_id, lookup_id, 0.0)
    assert (found.chunks, found.coming) == (1, 0)
    assert eng.take_resolved() == [lookup_id]
    assert eng.numbers().pinned_bytes == PAGE, "a chunk behind the gap is not held"


@pytest.mark.parametrize("how", ["expiry", "death", "loss", "clear"])
def test_a_writers_end_resolves_the_lookup(eng: Engine, client: FakeClient, other: FakeClient, how: str) -> None:
    client.prepare(digests(0), now_s=0.0)
    lookup_id, found = other.lookup(digests(0), now_s=30.0)
    assert found.coming == 1

    if how == "expiry":
        eng.tick(61.0)
    elif how == "clear":
        eng.clear("t", "", True, 31.0)
    else:
        eng.client_lost(client.client_id, 31.0, proven_dead=how == "death")

    assert eng.take_resolved() == [lookup_id]
    found = eng.lookup_status(other.client_id, lookup_id, 61.0)
    assert (found.chunks, found.coming) == (0, 0)


def test_an_end_while_waiting_is_told_and_holds_nothing(eng: Engine, client: FakeClient, other: FakeClient) -> None:
    store_id, rows = client.prepare(digests(0))
    lookup_id, _ = other.lookup(digests(0), "r")

    eng.end_request(other.client_id, "r", 0.0)

    assert eng.take_resolved() == [lookup_id]
    with pytest.raises(UnknownLease):
        eng.lookup_status(other.client_id, lookup_id, 0.0)
    client.commit(store_id, rows)
    assert eng.numbers().pinned_bytes == 0


def test_a_lookup_id_that_is_used_again_is_not_taken_for_the_former(
    eng: Engine, client: FakeClient, other: FakeClient
) -> None:
    store_id, rows = client.prepare(digests(0))
    lookup_id, _ = other.lookup(digests(0), "r")
    later, later_rows = client.prepare(digests(5))
    other.lookup(digests(5), "r", lookup_id)

    client.commit(store_id, rows)

    assert eng.lookup_status(other.client_id, lookup_id, 0.0).coming == 1
    client.commit(later, later_rows)
    assert eng.lookup_status(other.client_id, lookup_id, 0.0).chunks == 1


def test_freeing_a_range_that_is_coming_ends_the_wait(eng: Engine, client: FakeClient, other: FakeClient) -> None:
    client.store(digests(0))
    store_id, rows = client.prepare(digests(1), first=1)
    lookup_id, _ = other.lookup(digests(0, 1))

    assert eng.free_lookup(other.client_id, lookup_id, 1, ALL, 0.0) == 0

    assert eng.lookup_status(other.client_id, lookup_id, 0.0).coming == 0
    client.commit(store_id, rows)
    assert eng.numbers().pinned_bytes == PAGE


def test_a_hybrid_lookup_waits_for_the_window_that_comes(eng: Engine, arena: MemoryArena) -> None:
    groups = (
        GroupSpec(kind=GroupKind.FULL, shard_bytes=PAGE),
        GroupSpec(kind=GroupKind.STATE, shard_bytes=PAGE),
    )
    client = FakeClient(eng, arena, groups=groups).join()
    client.store(digests(0, 1, 2))
    client.store(digests(0), group=1)
    store_id, rows = client.prepare(digests(2), group=1, first=2)

    lookup_id, found = client.lookup(digests(0, 1, 2))
    assert (found.chunks, found.coming) == (1, 2)
    assert eng.numbers().pinned_bytes == 4 * PAGE
    client.commit(store_id, rows)

    found = eng.lookup_status(client.client_id, lookup_id, 0.0)
    assert (found.chunks, found.coming) == (3, 0)
    assert eng.numbers().pinned_bytes == 4 * PAGE, "the state of the shorter prefix is held no more"


# Tiers


@pytest.fixture
def tiered(arena: MemoryArena, tier: FakeTier) -> FakeClient:
    return FakeClient(engine(arena, [tier]), arena).join()


def test_a_tiers_chunks_come_back(tiered: FakeClient, tier: FakeTier) -> None:
    hold(tier, 1, 2)
    tiered.store(digests(0))

    lookup_id, found = tiered.lookup(digests(0, 1, 2, 3))
    assert (found.chunks, found.coming) == (1, 2)
    tier.finish(1)
    tiered.engine.tick(0.1)
    assert tiered.engine.lookup_status(tiered.client_id, lookup_id, 0.1).chunks == 2
    tier.finish()
    tiered.engine.tick(0.2)

    assert tiered.engine.take_resolved() == [lookup_id]
    plan = tiered.read(lookup_id, 0, 3)
    assert plan.placements["disposition"].tolist() == [Disposition.IN_PLACE] * 3
    assert bytes(tiered.arena.view(int(plan.placements["slot"][2]))) == b"t" * PAGE
    assert tiered.vouch(lookup_id, 0, 3) == [Disposition.VOUCHED] * 3
    assert tiered.found(digests(0, 1, 2)) == 3, "they stay in L1"
    check(tiered.engine)


def test_a_fetch_that_fails_is_a_miss(tiered: FakeClient, tier: FakeTier) -> None:
    keys = hold(tier, 0, 1)
    tier.failing = {keys[1]}
    lookup_id, found = tiered.lookup(digests(0, 1))
    assert found.coming == 2

    tier.finish()
    tiered.engine.tick(0.1)

    status = tiered.engine.lookup_status(tiered.client_id, lookup_id, 0.1)
    assert (status.chunks, status.coming) == (1, 0)
    assert tiered.engine.numbers().counters['kvpool_tier_fetches_total{result="miss"}'] == 1
    check(tiered.engine)


def test_a_piece_of_another_size_is_a_miss(tiered: FakeClient, tier: FakeTier) -> None:
    hold(tier, 0, data=b"short")
    lookup_id, _ = tiered.lookup(digests(0))

    tier.finish()
    tiered.engine.tick(0.1)

    assert tiered.engine.lookup_status(tiered.client_id, lookup_id, 0.1).chunks == 0


def test_a_fetch_outlives_its_lookup(tiered: FakeClient, tier: FakeTier) -> None:
    hold(tier, 0)
    tiered.lookup(digests(0), "r")
    tiered.engine.end_request(tiered.client_id, "r", 0.0)

    tier.finish()
    tiered.engine.tick(0.1)

    assert tiered.found(digests(0)) == 1
    assert tiered.engine.numbers().pinned_bytes == 0


def test_two_lookups_share_one_fetch(tiered: FakeClient, tier: FakeTier) -> None:
    hold(tier, 0)

    ids = [tiered.lookup(digests(0), request)[0] for request in ("a", "b")]
    assert len(tier.pending) == 1
    tier.finish()
    tiered.engine.tick(0.1)

    assert [tiered.engine.lookup_status(tiered.client_id, i, 0.1).chunks for i in ids] == [1, 1]


def test_a_cleared_fetch_brings_nothing(tiered: FakeClient, tier: FakeTier) -> None:
    hold(tier, 0)
    tiered.lookup(digests(0))
    tiered.engine.clear("t", "", True, 0.0)
    tier.kept.clear()

    tier.finish()
    tiered.engine.tick(0.1)

    assert tiered.found(digests(0)) == 0
    check(tiered.engine)


def test_chunks_behind_a_gap_are_not_fetched(tiered: FakeClient, tier: FakeTier) -> None:
    hold(tier, 2)

    _, found = tiered.lookup(digests(0, 1, 2))

    assert found.coming == 0
    assert tier.pending == {}


def test_without_room_less_is_coming(arena: MemoryArena, tier: FakeTier) -> None:
    tiered = FakeClient(engine(arena, [tier]), arena).join()
    tiered.prepare(digests(*range(100, 163)))
    hold(tier, 0, 1, 2)

    _, found = tiered.lookup(digests(0, 1, 2))

    assert (found.chunks, found.coming) == (0, 1)
    check(tiered.engine)


def test_the_second_tier_is_asked_for_what_the_first_has_not(arena: MemoryArena, tier: FakeTier) -> None:
    lower = FakeTier()
    client = FakeClient(engine(arena, [tier, lower]), arena, mode=Mode.STREAMED).join()
    hold(tier, 0)
    hold(lower, 0, 1, data=b"l" * PAGE)

    lookup_id, _ = client.lookup(digests(0, 1))
    assert (len(tier.pending), len(lower.pending)) == (1, 1)
    tier.finish()
    lower.finish()
    client.engine.tick(0.1)

    assert client.read(lookup_id, 0, 2).placements["disposition"].tolist() == [Disposition.STREAM] * 2
