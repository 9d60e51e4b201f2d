# SPDX-License-Identifier: Apache-2.0
import pytest
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, digests, engine, fresh_id, namespace

from kvpool.config import LimitConfig
from kvpool.engine.engine import Engine
from kvpool.engine.outcomes import Access
from kvpool.model.errors import Busy, IdentityRefused, LayoutRefused, Malformed, NotRegistered, RoleForbidden
from kvpool.model.identity import ClientKind, GroupKind, GroupSpec, Mode, Role
from kvpool.model.slots import Disposition


def spec(shard_bytes: int = PAGE, kind: GroupKind = GroupKind.FULL, window_tokens: int = 0) -> GroupSpec:
    return GroupSpec(kind=kind, shard_bytes=shard_bytes, window_tokens=window_tokens)


@pytest.mark.parametrize("verb", ["lookup_status", "end_request"])
def test_a_client_without_hello_is_not_registered(eng: Engine, verb: str) -> None:
    with pytest.raises(NotRegistered):
        getattr(eng, verb)(fresh_id(), "r" if verb == "end_request" else fresh_id(), 0.0)


@pytest.mark.behaviour("R011", "R125")
def test_stores_and_lookups_need_a_registration(eng: Engine, arena: MemoryArena) -> None:
    client = FakeClient(eng, arena)
    eng.hello(client.client_id, ClientKind.WORKER, Role.BOTH, "t", "", 0.0)

    with pytest.raises(NotRegistered):
        client.prepare(digests(1))
    with pytest.raises(NotRegistered):
        client.lookup(digests(1))


@pytest.mark.behaviour("R005")
def test_a_second_registration_replaces_the_first(client: FakeClient) -> None:
    client.store(digests(1, 2))
    client.space = namespace("other")

    client.join()

    assert client.found(digests(1, 2)) == 0
    assert [c.model for c in client.engine.clients(0.0)] == ["other"]


@pytest.mark.behaviour("R006")
def test_unregistering_an_unknown_client_is_no_error(eng: Engine, client: FakeClient) -> None:
    assert eng.unregister(client.client_id, 0.0)
    assert not eng.unregister(client.client_id, 0.0)
    assert not eng.unregister(fresh_id(), 0.0)


@pytest.mark.behaviour("D050")
def test_an_id_of_another_tenant_is_refused(eng: Engine, client: FakeClient) -> None:
    with pytest.raises(IdentityRefused):
        eng.hello(client.client_id, ClientKind.WORKER, Role.BOTH, "intruder", "", 0.0)

    assert client.store(digests(1)) == [Disposition.STORED]


def test_an_id_of_zeros_is_refused(eng: Engine) -> None:
    with pytest.raises(Malformed):
        eng.hello(bytes(16), ClientKind.WORKER, Role.BOTH, "t", "", 0.0)


@pytest.mark.behaviour("D036")
def test_clients_are_limited(arena: MemoryArena) -> None:
    eng = engine(arena, limits=LimitConfig(clients=1))
    first = FakeClient(eng, arena).join()

    with pytest.raises(Busy, match="clients are here"):
        FakeClient(eng, arena).join()
    first.join()


@pytest.mark.behaviour("D036")
def test_namespaces_are_limited_and_unused_ones_make_room(arena: MemoryArena) -> None:
    eng = engine(arena, limits=LimitConfig(namespaces=2))
    one = FakeClient(eng, arena, space=namespace("one")).join()
    FakeClient(eng, arena, space=namespace("two")).join()
    with pytest.raises(Busy, match="namespaces are in use"):
        FakeClient(eng, arena, space=namespace("three")).join()

    eng.unregister(one.client_id, 0.0)

    assert FakeClient(eng, arena, space=namespace("three")).join().store(digests(1)) == [Disposition.STORED]


def test_a_namespace_with_chunks_does_not_make_room(arena: MemoryArena) -> None:
    eng = engine(arena, limits=LimitConfig(namespaces=1))
    one = FakeClient(eng, arena, space=namespace("one")).join()
    one.store(digests(1))
    eng.unregister(one.client_id, 0.0)

    with pytest.raises(Busy):
        FakeClient(eng, arena, space=namespace("two")).join()


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ((), "at least one group"),
        ((spec(PAGE * 1000),), f"{PAGE * 1000} bytes does not fit a segment of {16 * PAGE}"),
        ((spec(0),), "0 bytes"),
        ((spec(kind=GroupKind.WINDOW),), "window of 0 tokens"),
        ((spec(window_tokens=5),), "full with a window of 5 tokens"),
    ],
)
def test_layouts_that_cannot_be_kept_are_refused_with_the_numbers(
    eng: Engine, arena: MemoryArena, groups: tuple[GroupSpec, ...], text: str
) -> None:
    with pytest.raises(LayoutRefused, match=text):
        FakeClient(eng, arena, groups=groups).join()


@pytest.mark.parametrize("shards", [(), (0, 0), (2,), (-1,)])
def test_shards_outside_the_split_are_refused(eng: Engine, arena: MemoryArena, shards: tuple[int, ...]) -> None:
    with pytest.raises(LayoutRefused):
        FakeClient(eng, arena, space=namespace(shard_count=2), shards=shards).join()


@pytest.mark.behaviour("D016", "R007")
def test_one_namespace_has_one_layout(eng: Engine, arena: MemoryArena, client: FakeClient) -> None:
    with pytest.raises(LayoutRefused, match=f"full of {PAGE} bytes, not with group 0: full of {2 * PAGE} bytes"):
        FakeClient(eng, arena, groups=(spec(2 * PAGE),)).join()


def test_a_namespace_that_nobody_uses_may_get_another_layout(
    eng: Engine, arena: MemoryArena, client: FakeClient
) -> None:
    client.store(digests(1))
    eng.unregister(client.client_id, 0.0)

    other = FakeClient(eng, arena, groups=(spec(2 * PAGE),)).join()

    assert other.found(digests(1)) == 0
    assert eng.numbers().chunks == 0


def test_a_producer_does_not_load_and_a_consumer_does_not_store(eng: Engine, arena: MemoryArena) -> None:
    producer = FakeClient(eng, arena, role=Role.PRODUCER).join()
    consumer = FakeClient(eng, arena, role=Role.CONSUMER).join()

    assert producer.store(digests(1)) == [Disposition.STORED]
    with pytest.raises(RoleForbidden):
        producer.lookup(digests(1))
    with pytest.raises(RoleForbidden):
        consumer.store(digests(2))
    lookup_id, _ = consumer.lookup(digests(1))
    for verb in (producer.read, producer.vouch):
        with pytest.raises(RoleForbidden):
            verb(lookup_id, 0, 1)


@pytest.mark.behaviour("D015")
def test_clients_with_the_same_label_do_not_meet(eng: Engine, arena: MemoryArena) -> None:
    one, two = FakeClient(eng, arena).join(), FakeClient(eng, arena).join()
    one.store(digests(1))

    eng.unregister(one.client_id, 0.0)

    assert two.store(digests(2)) == [Disposition.STORED]
    assert len(eng.clients(0.0)) == 1


@pytest.mark.behaviour("D107")
def test_a_client_maps_its_own_tenants_regions_alone(eng: Engine, arena: MemoryArena) -> None:
    mine = FakeClient(eng, arena, tenant="a").join()
    reader = FakeClient(eng, arena, tenant="a", role=Role.CONSUMER).join()
    other = FakeClient(eng, arena, tenant="b").join()
    streamed = FakeClient(eng, arena, tenant="a", mode=Mode.STREAMED).join()
    _, rows = mine.prepare(digests(1))
    _, server_rows = streamed.prepare(digests(2))
    region, server_region = int(rows["memory"][0]), int(server_rows["memory"][0])

    assert region != server_region
    assert eng.region_access(mine.client_id, region) is Access.WRITE
    assert eng.region_access(reader.client_id, region) is Access.READ
    assert eng.region_access(other.client_id, region) is Access.NONE
    assert eng.region_access(streamed.client_id, region) is Access.NONE
    assert eng.region_access(mine.client_id, server_region) is Access.NONE
    assert eng.region_access(mine.client_id, 99) is Access.NONE
    assert eng.region_access(fresh_id(), region) is Access.NONE
