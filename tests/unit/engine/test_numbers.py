# SPDX-License-Identifier: Apache-2.0
import pytest
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, digests

from kvpool.engine.engine import Engine
from kvpool.index.phases import IllegalMove
from kvpool.metrics.catalogue import all_series
from kvpool.model.identity import ClientKind, Mode, Role


def test_every_series_exists_from_the_start_and_is_in_the_catalogue(eng: Engine) -> None:
    counters = eng.numbers().counters

    assert set(counters.values()) == {0}
    assert set(counters) <= set(all_series())
    assert len(counters) > 20


def test_counts_what_happens(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0, 1))
    client.store(digests(0))
    lookup_id, _ = client.lookup(digests(0, 1, 2))
    client.vouch(lookup_id, 0, 2)
    client.vouch(lookup_id, 0, 2)

    counters = {name: value for name, value in eng.numbers().counters.items() if value}

    assert counters == {
        "kvpool_store_begun_chunks_total": 2,
        'kvpool_store_chunks_total{disposition="stored"}': 2,
        'kvpool_store_chunks_total{disposition="present"}': 1,
        "kvpool_store_bytes_total": 2 * PAGE,
        'kvpool_lookups_total{reason="missing"}': 1,
        "kvpool_lookup_tokens_total": 48,
        "kvpool_hit_tokens_total": 32,
        'kvpool_load_chunks_total{result="vouched"}': 2,
        'kvpool_load_chunks_total{result="lost"}': 2,
        "kvpool_load_bytes_total": 2 * PAGE,
    }


def test_tokens_that_arrive_later_count_as_hits(eng: Engine, client: FakeClient) -> None:
    store_id, rows = client.prepare(digests(0))
    client.lookup(digests(0))
    client.commit(store_id, rows)

    assert eng.numbers().counters["kvpool_hit_tokens_total"] == 16


@pytest.mark.behaviour("R059")
def test_says_how_full_it_is(eng: Engine, client: FakeClient, arena: MemoryArena) -> None:
    client.store(digests(0, 1, 2))
    client.lookup(digests(0), now_s=4.0)
    client.prepare(digests(5), now_s=6.0)
    eng.tick(10.0)

    numbers = eng.numbers()

    assert (numbers.slots, numbers.slots_used, numbers.chunks) == (16, 4, 3)
    assert (numbers.l1_bytes, numbers.used_bytes, numbers.pinned_bytes) == (64 * PAGE, 4 * PAGE, PAGE)
    assert (numbers.regions, numbers.regions_empty, numbers.regions_draining) == (4, 3, 0)
    assert (numbers.clients, numbers.sessions, numbers.leases, numbers.oldest_lease_s) == (1, 1, 2, 6.0)


def test_says_what_each_client_holds(eng: Engine, client: FakeClient, arena: MemoryArena) -> None:
    arena.outside_writers = {0, 1, 2, 3}
    client.store(digests(0, 1))
    client.lookup(digests(0, 1), "a")
    client.lookup(digests(0), "b")
    client.prepare(digests(5))
    eng.tick(60.0)
    client.lookup(digests(0, 1), "a", now_s=60.0)
    client.prepare(digests(6), now_s=60.0)

    (row,) = eng.clients(63.0)

    assert (row.client_id, row.label, row.tenant, row.model) == (client.client_id, "label", "t", "m")
    assert (row.kind, row.role, row.mode) == (ClientKind.WORKER, Role.BOTH, Mode.CLIENT_MOVED)
    assert (row.pinned_bytes, row.held_bytes, row.lookups, row.stores) == (2 * PAGE, 2 * PAGE, 1, 1)
    assert row.idle_s == 3.0


def test_a_client_that_did_not_register_has_no_mode(eng: Engine, arena: MemoryArena) -> None:
    client = FakeClient(eng, arena)
    eng.hello(client.client_id, ClientKind.PROBE, Role.BOTH, "t", "", 0.0)

    assert [(row.mode, row.model) for row in eng.clients(0.0)] == [(None, "")]


def test_an_illegal_move_is_counted_and_not_repaired(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))

    with pytest.raises(IllegalMove):
        eng._core.index.unpin(eng._core.index.scopes.numbered(1).find([digests(0)]), 1)

    assert eng.numbers().counters["kvpool_illegal_moves_total"] == 1
    assert client.found(digests(0)) == 1


def test_nothing_to_do_means_no_deadline(eng: Engine) -> None:
    assert eng.next_deadline_s() is None
