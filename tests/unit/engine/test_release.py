# SPDX-License-Identifier: Apache-2.0
import pytest
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, digests, engine, fresh_id, namespace

from kvpool.engine.engine import Engine
from kvpool.model.reasons import LookupReason
from kvpool.model.slots import Disposition

ALL = 1 << 31


def pinned(eng: Engine) -> int:
    return eng.numbers().pinned_bytes // PAGE


@pytest.mark.behaviour("R053", "R054", "D019", "D020")
def test_freeing_covers_its_range_alone_and_twice_is_once(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0, 1, 2, 3))
    lookup_id, _ = client.lookup(digests(0, 1, 2, 3), "a")
    other, _ = client.lookup(digests(0, 1, 2, 3), "b")

    assert eng.free_lookup(client.client_id, lookup_id, 1, 3, 0.0) == 2
    assert eng.free_lookup(client.client_id, lookup_id, 1, 3, 0.0) == 0
    assert eng.free_lookup(client.client_id, lookup_id, 2, 2, 0.0) == 0
    assert eng.free_lookup(client.client_id, lookup_id, 0, ALL, 0.0) == 2
    assert pinned(eng) == 4, "the other lookup's pins are its own"

    assert eng.free_lookup(client.client_id, other, 3, ALL, 0.0) == 1
    assert client.vouch(other, 0, 3) == [Disposition.VOUCHED] * 3


@pytest.mark.behaviour("R053", "D018")
def test_freeing_releases_all_readers_in_all_shards(eng: Engine, arena: MemoryArena) -> None:
    client = FakeClient(eng, arena, space=namespace(shard_count=2), shards=(0, 1), readers=2).join()
    for shard in (0, 1):
        client.store(digests(0), shard=shard)
    lookup_id, _ = client.lookup(digests(0))

    assert eng.free_lookup(client.client_id, lookup_id, 0, ALL, 0.0) == 1

    assert pinned(eng) == 0


def test_a_free_that_comes_first_lets_its_lookup_pin_nothing(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))
    lookup_id = fresh_id()
    assert eng.free_lookup(client.client_id, lookup_id, 0, ALL, 0.0) == 0

    _, found = client.lookup(digests(0), "r", lookup_id)

    assert (found.chunks, found.reason, pinned(eng)) == (0, LookupReason.ENDED, 0)


@pytest.mark.behaviour("R057", "D061")
def test_an_end_that_comes_first_lets_its_lookup_pin_nothing(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))
    assert eng.end_request(client.client_id, "r", 0.0) == 0

    assert client.lookup(digests(0), "r", now_s=1.0)[1].reason is LookupReason.ENDED
    assert client.lookup(digests(0), "r", now_s=2.0)[1].chunks == 1, "the id may be used again"


@pytest.mark.behaviour("D060")
def test_an_end_in_time_does_not_block_the_id(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))
    client.lookup(digests(0), "r")
    assert eng.end_request(client.client_id, "r", 0.0) == 1

    assert client.lookup(digests(0), "r")[1].chunks == 1


def test_an_end_of_another_client_says_nothing(eng: Engine, arena: MemoryArena, client: FakeClient) -> None:
    client.store(digests(0))
    other = FakeClient(eng, arena).join()
    client.lookup(digests(0), "r")

    assert eng.end_request(other.client_id, "r", 0.0) == 0

    assert pinned(eng) == 1


@pytest.mark.behaviour("D121")
def test_what_another_tenant_frees_too_early_ends_no_lookup_of_ours(
    eng: Engine, client: FakeClient, arena: MemoryArena
) -> None:
    client.store(digests(0))
    lookup_id = fresh_id()
    stranger = FakeClient(eng, arena, tenant="other").join()

    assert eng.free_lookup(stranger.client_id, lookup_id, 0, ALL, 0.0) == 0

    assert client.lookup(digests(0), "a", lookup_id)[1].chunks == 1


def test_tombstones_are_forgotten(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))
    lookup_id = fresh_id()
    eng.end_request(client.client_id, "r", 0.0)
    eng.free_lookup(client.client_id, lookup_id, 0, ALL, 0.0)
    assert eng.next_deadline_s() == 60.0
    eng.tick(60.0)

    assert client.lookup(digests(0), "r", lookup_id, now_s=60.0)[1].chunks == 1


def test_the_end_of_a_request_frees_its_lookup_and_not_its_store(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))
    store_id, rows = client.prepare(digests(1), first=1)
    client.lookup(digests(0), "r")

    assert eng.end_request(client.client_id, "r", 0.0) == 1

    assert (pinned(eng), eng.numbers().sessions) == (0, 0)
    assert client.commit(store_id, rows) == [Disposition.STORED]


@pytest.mark.behaviour("R052", "D010", "D023")
def test_a_lookup_that_nobody_ends_runs_out(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))
    client.lookup(digests(0), now_s=5.0)
    assert eng.next_deadline_s() == 65.0

    eng.tick(64.9)
    assert pinned(eng) == 1
    eng.tick(65.0)

    assert (pinned(eng), eng.numbers().leases) == (0, 0)


@pytest.mark.behaviour("R081", "D116")
def test_an_idle_request_is_forgotten_counted_from_its_last_call(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))
    client.lookup(digests(0), "r", now_s=0.0)
    client.lookup(digests(0), "r", now_s=500.0)

    eng.tick(700.0)
    assert eng.numbers().sessions == 1
    eng.tick(1101.0)

    assert eng.numbers().sessions == 0


@pytest.mark.behaviour("D010", "D061")
def test_a_lost_client_frees_its_lookups(eng: Engine, arena: MemoryArena, client: FakeClient) -> None:
    client.store(digests(0))
    client.lookup(digests(0))
    other = FakeClient(eng, arena).join()
    other.lookup(digests(0))

    eng.client_lost(client.client_id, 0.0, proven_dead=False)

    numbers = eng.numbers()
    assert (numbers.leases, numbers.sessions, numbers.clients) == (1, 1, 1)
    assert pinned(eng) == 1


def test_hello_again_frees_the_leases_of_the_former_connection(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))
    lookup_id, _ = client.lookup(digests(0))

    client.join(1.0)

    assert pinned(eng) == 0
    assert client.vouch(lookup_id, 0, 1, now_s=1.0) == [Disposition.LOST]


# Clear


@pytest.mark.behaviour("R062")
def test_clear_drops_what_nobody_holds(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0, 1, 2))
    client.prepare(digests(3), first=3)
    client.lookup(digests(0))

    assert eng.clear("t", "", False, 0.0) == (2, 2)

    assert client.found(digests(0, 1, 2)) == 1
    assert eng.numbers().counters["kvpool_cleared_chunks_total"] == 2


@pytest.mark.behaviour("R062")
def test_clear_stays_within_its_tenant_and_model(eng: Engine, arena: MemoryArena) -> None:
    clients = {
        (tenant, model): FakeClient(eng, arena, tenant=tenant, space=namespace(model)).join()
        for tenant in ("a", "b")
        for model in ("m", "n")
    }
    for client in clients.values():
        client.store(digests(0))

    def left() -> list[tuple[str, str]]:
        return [key for key, client in clients.items() if client.found(digests(0))]

    eng.clear("a", "m", False, 0.0)
    assert left() == [("a", "n"), ("b", "m"), ("b", "n")]
    eng.clear("b", "", False, 0.0)
    assert left() == [("a", "n")]
    eng.clear(None, "", False, 0.0)
    assert left() == []


def test_a_forced_clear_drops_a_store_under_way(eng: Engine, client: FakeClient) -> None:
    store_id, rows = client.prepare(digests(0))

    assert eng.clear("t", "", True, 0.0) == (1, 0)

    assert eng.numbers().slots_used == 1, "its writer may still write"
    assert client.commit(store_id, rows) == [Disposition.ABANDONED]
    assert (client.found(digests(0)), eng.numbers().slots_used) == (0, 0)


def test_cleared_chunks_do_not_come_back_after_a_restart(client: FakeClient, arena: MemoryArena) -> None:
    client.store(digests(0, 1))
    client.lookup(digests(0))
    client.engine.clear("t", "", True, 0.0)

    again = engine(arena.reopen())

    assert again.recover(0.0).chunks == 0
