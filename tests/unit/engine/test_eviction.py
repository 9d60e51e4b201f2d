# SPDX-License-Identifier: Apache-2.0
"""Making room: 4 regions of 16 pages, 64 slots of one page in all."""

import pytest
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, digests, engine, namespace

from kvpool.config import L1Config, LeaseConfig
from kvpool.engine import upkeep
from kvpool.engine.engine import Engine
from kvpool.engine.outcomes import Access
from kvpool.model.identity import GroupKind, GroupSpec, Mode
from kvpool.model.slots import Disposition

STORED, PINNED, FULL = Disposition.STORED, Disposition.PINNED, Disposition.FULL


def sized(eng: Engine, arena: MemoryArena, pages: int, **changes: object) -> FakeClient:
    groups = (GroupSpec(kind=GroupKind.FULL, shard_bytes=pages * PAGE),)
    return FakeClient(eng, arena, groups=groups, space=namespace(f"{pages} pages"), **changes).join()  # type: ignore[arg-type]


@pytest.mark.behaviour("D105")
def test_a_full_cache_drops_no_store(eng: Engine, client: FakeClient) -> None:
    for chain in range(40):
        assert client.store(digests(*range(16), chain=chain)) == [STORED] * 16

    assert client.found(digests(*range(16), chain=39)) == 16
    assert eng.numbers().chunks == 64
    assert eng.numbers().counters["kvpool_evicted_chunks_total"] == 40 * 16 - 64


@pytest.mark.behaviour("D105")
def test_a_store_larger_than_what_is_free_makes_its_room(client: FakeClient) -> None:
    for chain in range(4):
        client.store(digests(*range(15), chain=chain))

    assert client.store(digests(*range(60), chain=9)) == [STORED] * 60


@pytest.mark.behaviour("D105")
def test_victims_that_were_used_since_they_were_found_drop_no_store(client: FakeClient) -> None:
    client.store(digests(*range(64)))
    client.store(digests(0, chain=1))
    assert client.found(digests(*range(63))) == 63

    assert client.store(digests(0, chain=2)) == [STORED]


@pytest.mark.behaviour("D004")
def test_a_store_larger_than_the_memory_keeps_its_beginning(client: FakeClient) -> None:
    answer = client.store(digests(*range(80)))

    assert answer == [STORED] * 64 + [FULL] * 16
    assert client.found(digests(*range(80))) == 64


def test_leaves_go_before_what_they_hang_on(client: FakeClient) -> None:
    client.store(digests(*range(60)))

    client.store(digests(*range(10), chain=1))

    assert client.found(digests(*range(60))) == 54


def test_pinned_chunks_stay_and_are_named_as_the_reason(eng: Engine, client: FakeClient) -> None:
    client.store(digests(*range(64)))
    client.lookup(digests(*range(60)), "r")

    assert client.store(digests(*range(10), chain=1)) == [STORED] * 4 + [PINNED] * 6
    assert client.found(digests(*range(64))) == 60
    assert eng.numbers().counters['kvpool_store_chunks_total{disposition="pinned"}'] == 6

    eng.end_request(client.client_id, "r", 0.0)
    assert client.store(digests(*range(20, 30), chain=1)) == [STORED] * 10


@pytest.mark.behaviour("D004")
def test_writes_under_way_alone_fill_the_cache(client: FakeClient) -> None:
    client.prepare(digests(*range(64)))

    assert client.prepare(digests(0, chain=1))[1]["disposition"].tolist() == [FULL]


@pytest.mark.behaviour("D118")
def test_another_size_gets_the_region_worth_least(eng: Engine, arena: MemoryArena) -> None:
    small, large = sized(eng, arena, 1), sized(eng, arena, 5)
    for chain in range(4):
        small.store(digests(*range(16), chain=chain))
    small.found(digests(*range(16), chain=0))

    assert large.store(digests(0, 1, 2)) == [STORED] * 3

    assert [small.found(digests(*range(16), chain=c)) for c in range(4)] == [16, 0, 16, 16]


def test_a_size_that_is_full_takes_over_what_is_colder(eng: Engine, arena: MemoryArena) -> None:
    small, large = sized(eng, arena, 1), sized(eng, arena, 4)
    small.store(digests(*range(48)))
    for chain in range(4):
        assert large.store(digests(*range(4), chain=chain)) == [STORED] * 4

    assert [large.found(digests(*range(4), chain=chain)) for chain in range(4)] == [4] * 4
    assert small.found(digests(*range(48))) == 0


@pytest.mark.behaviour("D118")
def test_a_size_that_is_full_keeps_to_its_own_where_the_others_are_warmer(eng: Engine, arena: MemoryArena) -> None:
    small, large = sized(eng, arena, 1), sized(eng, arena, 4)
    small.store(digests(*range(48)))
    large.store(digests(*range(4)))

    assert small.store(digests(0, chain=1)) == [STORED]

    assert large.found(digests(*range(4))) == 4
    assert small.found(digests(*range(48))) == 47


@pytest.mark.behaviour("D118")
def test_one_held_region_drains_at_a_time(eng: Engine, arena: MemoryArena) -> None:
    """Else stores that find no room would soon leave no region that serves."""
    small, large = sized(eng, arena, 1), sized(eng, arena, 4)
    for chain in range(4):
        small.store(digests(*range(16), chain=chain))
        small.lookup(digests(0, chain=chain), f"r{chain}")

    for number in range(3):
        assert large.store(digests(number)) == [PINNED]

        assert eng.numbers().regions_draining == 1


def test_a_held_region_drains_while_its_pins_last(eng: Engine, arena: MemoryArena) -> None:
    small, large = sized(eng, arena, 1), sized(eng, arena, 4)
    for chain in range(4):
        small.store(digests(*range(16), chain=chain))
        small.lookup(digests(0, chain=chain), f"r{chain}")

    assert large.store(digests(0)) == [PINNED]
    assert eng.numbers().regions_draining == 1
    assert small.store(digests(1, chain=7)) == [STORED], "the other regions serve on"
    for chain in range(4):
        eng.end_request(small.client_id, f"r{chain}", 0.0)
    eng.tick(1.0)

    assert eng.numbers().regions_draining == 0
    assert large.store(digests(0), now_s=1.0) == [STORED]


def test_a_region_that_stays_held_is_let_be_for_another(arena: MemoryArena) -> None:
    eng = engine(arena, leases=LeaseConfig(lookup_s=10))
    small, large = sized(eng, arena, 1), sized(eng, arena, 4)
    for chain in range(4):
        small.store(digests(*range(16), chain=chain))
        small.prepare(digests(100, chain=chain), now_s=0.0)
    small.prepare(digests(*range(200, 260)), now_s=0.0)
    held = eng.numbers().slots_used
    assert large.store(digests(0)) == [FULL]
    assert eng.numbers().regions_draining == 1

    eng.tick(11.0)

    assert eng.numbers().regions_draining == 0
    assert eng.numbers().slots_used == held


def test_a_region_goes_to_another_tenant_only_when_nobody_can_reach_it(arena: MemoryArena) -> None:
    eng = engine(arena)
    one, two = FakeClient(eng, arena, tenant="one").join(), FakeClient(eng, arena, tenant="two").join()
    one.store(digests(*range(64)))
    assert [eng.region_access(one.client_id, r) for r in range(4)] == [Access.WRITE] * 4

    assert two.store(digests(0)) == [FULL]
    eng.client_lost(one.client_id, 0.0, proven_dead=False)
    assert two.store(digests(0)) == [FULL], "the process may live, with its mapping"
    arena.outside_writers = {0, 1, 2}
    eng.writers_proven_dead(one.client_id, 0.0)

    assert two.store(digests(0)) == [STORED]
    assert eng.region_access(two.client_id, 3) is Access.WRITE
    assert eng.region_access(two.client_id, 0) is Access.NONE


@pytest.mark.parametrize("word", ["unregister", "hello"])
def test_a_client_that_lives_on_gives_its_regions_back_by_its_word(arena: MemoryArena, word: str) -> None:
    """A process may end one session after another; what only its former sessions mapped must not stay its tenant's."""
    eng = engine(arena)
    one, two = FakeClient(eng, arena, tenant="one").join(), FakeClient(eng, arena, tenant="two").join()
    one.store(digests(*range(64)))
    assert [eng.region_access(one.client_id, r) for r in range(4)] == [Access.WRITE] * 4

    if word == "unregister":
        eng.unregister(one.client_id, 0.0)
    else:
        one.join()

    assert two.store(digests(0)) == [STORED]


def test_memory_that_is_less_than_promised_is_no_error(eng: Engine, arena: MemoryArena, client: FakeClient) -> None:
    client.store(digests(*range(16)))
    arena.full = True

    assert client.store(digests(*range(20), chain=1)) == [STORED] * 16 + [FULL] * 4

    arena.full = False
    assert client.store(digests(*range(20), chain=2)) == [STORED] * 20


@pytest.mark.behaviour("D104", "D105")
def test_the_background_evicts_down_to_its_share_in_batches(arena: MemoryArena) -> None:
    eng = engine(arena, l1=L1Config(evict_above=0.9, evict_to=0.5))
    client = FakeClient(eng, arena).join()
    client.store(digests(*range(56)))
    eng.tick(1.0)
    assert eng.numbers().chunks == 56

    client.store(digests(*range(8), chain=1))
    eng.tick(2.0)

    assert eng.numbers().chunks == 32
    assert client.found(digests(*range(8), chain=1)) == 8


@pytest.mark.behaviour("D104")
def test_the_background_goes_on_batch_by_batch_to_its_lower_share(
    arena: MemoryArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once less than the upper share is in use; and each batch leaves the loop time for others."""
    monkeypatch.setattr(upkeep, "_EVICT_BATCH", 10)
    eng = engine(arena, l1=L1Config(evict_above=0.9, evict_to=0.5))
    FakeClient(eng, arena).join().store(digests(*range(60)))
    left = []
    for _ in range(4):
        eng.tick(1.0)
        left.append((eng.numbers().chunks, eng.next_deadline_s() == 1.0))

    assert left[:3] == [(50, True), (40, True), (32, True)]
    assert left[3] == (32, False), "it is done"


def test_the_background_leaves_pinned_chunks_and_does_not_spin(arena: MemoryArena) -> None:
    eng = engine(arena, l1=L1Config(evict_above=0.9, evict_to=0.5))
    client = FakeClient(eng, arena).join()
    client.store(digests(*range(64)))
    client.lookup(digests(*range(64)), now_s=1.0)

    eng.tick(1.0)

    assert eng.numbers().chunks == 64
    assert (eng.next_deadline_s() or 0) > 1.0


@pytest.mark.behaviour("D107")
def test_streamed_chunks_lie_where_no_client_maps(eng: Engine, arena: MemoryArena) -> None:
    streamed = FakeClient(eng, arena, mode=Mode.STREAMED).join()
    mapped = FakeClient(eng, arena).join()

    _, theirs = streamed.prepare(digests(0))
    _, own = mapped.prepare(digests(1))

    assert theirs["memory"][0] != own["memory"][0]
