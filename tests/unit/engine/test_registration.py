# SPDX-License-Identifier: Apache-2.0
"""What a registration decides from then on, and what its end gives back."""

import pytest
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, digests, engine, namespace

from kvpool.engine.engine import Engine
from kvpool.model.errors import InvalidRange, NotRegistered
from kvpool.model.identity import ClientKind, GroupKind, GroupSpec, Mode, Role
from kvpool.model.slots import Disposition


@pytest.mark.behaviour("R004")
def test_each_client_is_served_by_what_it_registered_itself(eng: Engine, arena: MemoryArena) -> None:
    groups = tuple(GroupSpec(kind=GroupKind.FULL, shard_bytes=n * PAGE) for n in (1, 3))
    one = FakeClient(eng, arena, space=namespace("one", shard_count=2), groups=groups, shards=(1,), readers=2).join()
    two = FakeClient(eng, arena, space=namespace("two"), mode=Mode.STREAMED).join()
    for group in (0, 1):
        one.store(digests(0), group=group, shard=1)

    lookup_id, found = one.lookup(digests(0))

    assert found.chunks == 1
    assert one.read(lookup_id, 0, 1, group=1, shard=1).placements["length"].tolist() == [3 * PAGE]
    one.vouch(lookup_id, 0, 1, group=0, shard=1)
    assert eng.numbers().pinned_bytes == 4 * PAGE, "one of its two readers has yet to come"
    assert two.found(digests(0)) == 0
    assert {c.client_id: (c.model, c.mode) for c in eng.clients(0.0)} == {
        one.client_id: ("one", Mode.CLIENT_MOVED),
        two.client_id: ("two", Mode.STREAMED),
    }


@pytest.mark.behaviour("R006")
def test_unregistering_frees_everything_of_the_client(eng: Engine, arena: MemoryArena, client: FakeClient) -> None:
    arena.outside_writers = {0, 1, 2, 3}
    client.store(digests(0, 1))
    client.lookup(digests(0, 1), "r")
    client.prepare(digests(2), first=2)

    assert eng.unregister(client.client_id, 0.0)

    numbers = eng.numbers()
    assert (numbers.clients, numbers.sessions, numbers.leases) == (0, 0, 0)
    assert (numbers.pinned_bytes, numbers.quarantined_bytes, numbers.slots_used) == (0, 0, 2)
    assert FakeClient(eng, arena).join().found(digests(0, 1)) == 2, "what it had stored stays for the others"


@pytest.mark.behaviour("R011", "R012")
def test_a_worker_stores_its_own_shard_alone(eng: Engine, arena: MemoryArena) -> None:
    worker = FakeClient(eng, arena, space=namespace(shard_count=2), shards=(1,)).join()

    with pytest.raises(InvalidRange, match="not registered"):
        worker.prepare(digests(0), shard=0)
    assert worker.store(digests(0), shard=1) == [Disposition.STORED]


@pytest.mark.behaviour("R026")
def test_only_a_registered_client_loads_and_only_what_its_lookup_named(
    eng: Engine, arena: MemoryArena, client: FakeClient
) -> None:
    client.store(digests(0), b"first")
    client.store(digests(7), b"other")
    lookup_id, _ = client.lookup(digests(0), "a")
    client.lookup(digests(7), "b")
    early = FakeClient(eng, arena)
    eng.hello(early.client_id, ClientKind.WORKER, Role.BOTH, "t", "", 0.0)

    (slot,) = client.read(lookup_id, 0, 1).placements["slot"].tolist()

    assert bytes(arena.view(slot)[:5]) == b"first"
    with pytest.raises(NotRegistered):
        early.read(lookup_id, 0, 1)
    with pytest.raises(NotRegistered):
        early.vouch(lookup_id, 0, 1)


@pytest.mark.behaviour("D119")
def test_shards_beyond_a_byte_are_told_apart(eng: Engine, arena: MemoryArena) -> None:
    shards = (0, 44, 256, 300)
    client = FakeClient(eng, arena, space=namespace(shard_count=301), shards=shards).join()
    client.store(digests(0), shard=0)
    client.store(digests(0), shard=300)

    assert [client.lookup(digests(0), f"r{s}", shards=(s,))[1].chunks for s in shards] == [1, 0, 0, 1]


@pytest.mark.behaviour("R058")
@pytest.mark.parametrize("use", ["load", "store"])
def test_what_a_request_loaded_or_stored_last_goes_last(arena: MemoryArena, use: str) -> None:
    eng = engine(arena)
    client = FakeClient(eng, arena).join()
    client.store(digests(*range(8), chain=0))
    lookup_id, _ = client.lookup(digests(*range(8), chain=0), "r")
    for chain in range(1, 8 if use == "load" else 7):
        client.store(digests(*range(8), chain=chain))
    if use == "load":
        client.vouch(lookup_id, 0, 8)
    else:
        client.store(digests(*range(8), chain=7))
    eng.end_request(client.client_id, "r", 0.0)

    client.store(digests(*range(8), chain=9))

    used = 0 if use == "load" else 7
    assert client.found(digests(*range(8), chain=used)) == 8
    assert eng.numbers().counters["kvpool_evicted_chunks_total"] == 8
