# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, digests, engine, fresh_id, namespace
from tests.property.engine_checks import check

from kvpool.engine.engine import Engine
from kvpool.model.checksum import PREFERRED
from kvpool.model.identity import GroupKind, GroupSpec, Mode
from kvpool.model.slots import Disposition

ALL = 1 << 31


def restart(arena: MemoryArena) -> tuple[Engine, MemoryArena]:
    """The server is gone at this instant; the next one starts."""
    after = arena.reopen()
    return engine(after), after


def again(client: FakeClient, eng: Engine, arena: MemoryArena) -> FakeClient:
    """The same process, after it noticed."""
    client.engine, client.arena = eng, arena
    return client.join()


def test_a_fresh_arena_has_nothing_to_recover(eng: Engine) -> None:
    assert eng.recover(0.0) == (0, 0)


def test_chunks_are_found_again_with_their_bytes(client: FakeClient, arena: MemoryArena) -> None:
    client.store(digests(0, 1, 2), b"kept")
    eng, arena = restart(arena)

    assert eng.recover(0.0) == (3, 0)

    client = again(client, eng, arena)
    lookup_id, found = client.lookup(digests(0, 1, 2))
    assert found.chunks == 3
    plan = client.read(lookup_id, 0, 3)
    assert bytes(arena.view(int(plan.placements["slot"][2]))[:4]) == b"kept"
    assert client.vouch(lookup_id, 0, 3) == [Disposition.VOUCHED] * 3
    check(eng)


def test_recovered_chunks_are_verified_at_their_first_load(client: FakeClient, arena: MemoryArena) -> None:
    client.store(digests(0))
    eng, arena = restart(arena)
    eng.recover(0.0)
    client = again(client, eng, arena)
    kinds = []
    for _ in range(2):
        lookup_id, _ = client.lookup(digests(0))
        kinds.append(int(client.read(lookup_id, 0, 1).kinds[0]))
        client.vouch(lookup_id, 0, 1)

    assert kinds == [PREFERRED, 0]


def test_all_groups_shards_and_tenants_come_back(arena: MemoryArena) -> None:
    eng = engine(arena)
    groups = tuple(GroupSpec(kind=GroupKind.FULL, shard_bytes=n * PAGE) for n in (1, 2))
    clients = [
        FakeClient(eng, arena, tenant=t, groups=groups, space=namespace(shard_count=2), shards=(0, 1)).join()
        for t in ("a", "b")
    ]
    for client in clients:
        for group in (0, 1):
            for shard in (0, 1):
                client.store(digests(0, 1), group=group, shard=shard)
    eng, arena = restart(arena)

    assert eng.recover(0.0).chunks == 16
    assert [again(client, eng, arena).found(digests(0, 1)) for client in clients] == [2, 2]
    check(eng)


@pytest.mark.behaviour("D106")
def test_a_half_written_slot_is_quarantined_until_its_writer_says_hello(client: FakeClient, arena: MemoryArena) -> None:
    arena.outside_writers = {0, 1, 2, 3}
    client.prepare(digests(0, 1))
    other = FakeClient(client.engine, arena).join()
    other.prepare(digests(7))
    eng, arena = restart(arena)
    assert eng.recover(0.0) == (0, 3)
    eng.tick(100.0)

    again(other, eng, arena)
    assert eng.numbers().quarantined_bytes == 2 * PAGE
    again(client, eng, arena)

    assert eng.numbers().quarantined_bytes == 0
    assert client.found(digests(0, 1)) == 0
    check(eng)


def test_the_id_alone_of_another_tenant_does_not_free_quarantine(client: FakeClient, arena: MemoryArena) -> None:
    arena.outside_writers = {0, 1, 2, 3}
    client.prepare(digests(0))
    eng, arena = restart(arena)
    eng.recover(0.0)

    FakeClient(eng, arena, tenant="thief", client_id=client.client_id).join()

    assert eng.numbers().quarantined_bytes == PAGE


@pytest.mark.parametrize("how", ["region", "death"])
def test_quarantine_ends_with_proof(client: FakeClient, arena: MemoryArena, how: str) -> None:
    arena.outside_writers = {0, 1, 2, 3}
    client.prepare(digests(0))
    eng, arena = restart(arena)
    eng.recover(0.0)
    eng.tick(1.0)
    assert eng.numbers().quarantined_bytes == PAGE

    if how == "region":
        arena.outside_writers = set()
        eng.tick(2.0)
    else:
        eng.writers_proven_dead(client.client_id, 2.0)

    assert eng.numbers().slots_used == 0
    check(eng)


def test_a_slot_without_a_readable_header_waits_for_the_region(arena: MemoryArena) -> None:
    client = FakeClient(engine(arena), arena).join()
    arena.outside_writers = {0, 1, 2, 3}
    _, rows = client.prepare(digests(0))
    arena._rows[rows["slot"]] = np.zeros(1, dtype=arena._rows.dtype)
    eng, arena = restart(arena)
    assert eng.recover(0.0) == (0, 1)

    again(client, eng, arena)
    assert eng.numbers().quarantined_bytes == PAGE
    arena.outside_writers = set()
    eng.tick(1.0)

    assert eng.numbers().quarantined_bytes == 0


def test_an_expired_store_stays_quarantined_over_a_restart(client: FakeClient, arena: MemoryArena) -> None:
    arena.outside_writers = {0, 1, 2, 3}
    client.prepare(digests(0))
    client.engine.tick(60.0)
    eng, arena = restart(arena)

    assert eng.recover(0.0) == (0, 1)


def test_of_a_key_that_is_there_twice_one_is_kept(client: FakeClient, arena: MemoryArena) -> None:
    client.store(digests(1, 2))
    _, rows = client.prepare(digests(8, 9))
    slots = rows["slot"]
    twice = arena.rows(np.arange(arena.regions * arena.stride))
    source = [at for at, digest in enumerate(twice["digest"].tolist()) if digest in (digests(1), digests(2))]
    arena.begin(slots, twice[source])
    arena.commit(slots, twice[source]["length"], twice[source]["checksum"], twice[source]["checksum_kind"])
    eng, arena = restart(arena)

    assert eng.recover(0.0) == (2, 0)

    assert eng.numbers().slots_used == 2
    assert again(client, eng, arena).found(digests(1, 2)) == 2
    check(eng)
    third, _ = restart(arena)
    assert third.recover(0.0) == (2, 0)


def test_chunks_of_a_scope_that_nobody_remembers_are_freed(client: FakeClient, arena: MemoryArena) -> None:
    client.store(digests(0))
    arena._scopes.clear()
    eng, arena = restart(arena)

    assert eng.recover(0.0) == (0, 0)
    assert eng.numbers().slots_used == 0
    check(eng)


def test_clear_by_model_works_before_anybody_registered(client: FakeClient, arena: MemoryArena) -> None:
    other = FakeClient(client.engine, arena, space=namespace("other")).join()
    client.store(digests(0))
    other.store(digests(0, 1))
    eng, arena = restart(arena)
    eng.recover(0.0)

    assert eng.clear("t", "other", False, 0.0) == (2, 0)

    assert eng.numbers().chunks == 1
    assert eng.clear("stranger", "", False, 0.0) == (0, 0)


def test_chunks_of_another_size_are_dropped_when_the_layout_is_known(client: FakeClient, arena: MemoryArena) -> None:
    client.store(digests(0))
    eng, arena = restart(arena)
    eng.recover(0.0)
    client.groups = (GroupSpec(kind=GroupKind.FULL, shard_bytes=PAGE - 8),)

    client = again(client, eng, arena)

    assert client.found(digests(0)) == 0
    assert client.store(digests(0)) == [Disposition.STORED]
    check(eng)


def test_what_was_handed_out_before_is_void(client: FakeClient, arena: MemoryArena) -> None:
    client.store(digests(0))
    lookup_id, _ = client.lookup(digests(0))
    eng, arena = restart(arena)
    eng.recover(0.0)
    client = again(client, eng, arena)

    assert client.vouch(lookup_id, 0, 1) == [Disposition.LOST]


def test_half_streamed_slots_are_free_at_once(arena: MemoryArena) -> None:
    client = FakeClient(engine(arena), arena, mode=Mode.STREAMED).join()
    client.prepare(digests(0))
    eng, arena = restart(arena)
    assert eng.recover(0.0) == (0, 1)

    eng.tick(0.0)

    assert eng.numbers().slots_used == 0


def test_recovered_memory_serves_other_sizes(client: FakeClient, arena: MemoryArena) -> None:
    client.store(digests(*range(64)))
    eng, arena = restart(arena)
    eng.recover(0.0)
    groups = (GroupSpec(kind=GroupKind.FULL, shard_bytes=5 * PAGE),)
    large = FakeClient(eng, arena, groups=groups, space=namespace("large"), client_id=fresh_id()).join()

    assert large.store(digests(0)) == [Disposition.STORED]
    check(eng)
