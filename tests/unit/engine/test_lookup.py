# SPDX-License-Identifier: Apache-2.0
import pytest
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, digests, engine, fresh_id, namespace

from kvpool.config import LimitConfig
from kvpool.engine.engine import Engine
from kvpool.model.errors import Busy, InvalidRange, LimitExceeded, UnknownLease
from kvpool.model.identity import GroupKind, GroupSpec
from kvpool.model.reasons import LookupReason
from kvpool.model.slots import Disposition

FULL = GroupSpec(kind=GroupKind.FULL, shard_bytes=PAGE)


def pinned(eng: Engine) -> int:
    return eng.numbers().pinned_bytes // PAGE


@pytest.mark.behaviour("R041", "R051", "R052")
def test_finds_and_pins_the_longest_prefix(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0, 1, 2))

    _, found = client.lookup(digests(0, 1, 2, 3, 4))

    assert (found.chunks, found.coming, found.reason) == (3, 0, LookupReason.MISSING)
    assert pinned(eng) == 3


@pytest.mark.behaviour("R051")
def test_counting_stops_at_the_first_missing_chunk(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0, 1))
    client.store(digests(3, 4), first=3)

    _, found = client.lookup(digests(0, 1, 2, 3, 4))

    assert found.chunks == 2
    assert pinned(eng) == 2, "chunks behind the gap are not held"


def test_all_of_it_held_is_said(client: FakeClient) -> None:
    client.store(digests(0, 1))

    assert client.lookup(digests(0, 1))[1].reason is LookupReason.ALL


@pytest.mark.behaviour("R040")
def test_a_prompt_without_a_full_chunk_finds_nothing(client: FakeClient) -> None:
    _, found = client.lookup(b"")

    assert (found.chunks, found.coming, found.reason) == (0, 0, LookupReason.SHORT)


@pytest.mark.behaviour("R039")
def test_a_namespace_without_chunks_finds_nothing(client: FakeClient) -> None:
    assert client.lookup(digests(1))[1].reason is LookupReason.MISSING


def test_a_model_known_under_another_layout_is_named(eng: Engine, arena: MemoryArena, client: FakeClient) -> None:
    client.store(digests(0))
    other = FakeClient(eng, arena, space=namespace(layout="other")).join()
    foreign = FakeClient(eng, arena, space=namespace(layout="other"), tenant="stranger").join()

    assert other.lookup(digests(0))[1].reason is LookupReason.OTHER_LAYOUT
    assert foreign.lookup(digests(0))[1].reason is LookupReason.MISSING


@pytest.mark.behaviour("D017")
def test_tenants_and_namespaces_do_not_meet(eng: Engine, arena: MemoryArena, client: FakeClient) -> None:
    client.store(digests(0))
    strangers = [
        FakeClient(eng, arena, tenant="other").join(),
        FakeClient(eng, arena, space=namespace("other model")).join(),
    ]

    assert [stranger.found(digests(0)) for stranger in strangers] == [0, 0]


@pytest.mark.behaviour("R044", "R048", "D022")
def test_the_prefix_is_what_all_shards_hold_and_nothing_else_is_pinned(eng: Engine, arena: MemoryArena) -> None:
    client = FakeClient(eng, arena, space=namespace(shard_count=2), shards=(0, 1)).join()
    client.store(digests(0, 1, 2), shard=0)
    client.store(digests(0), shard=1)

    _, found = client.lookup(digests(0, 1, 2))

    assert (found.chunks, found.reason) == (1, LookupReason.INCOMPLETE)
    assert pinned(eng) == 2


@pytest.mark.behaviour("R075")
def test_only_the_shards_asked_for_count(eng: Engine, arena: MemoryArena) -> None:
    client = FakeClient(eng, arena, space=namespace(shard_count=2), shards=(0, 1)).join()
    client.store(digests(0, 1), shard=1)

    assert client.lookup(digests(0, 1), shards=(1,))[1].chunks == 2


@pytest.mark.parametrize("shards", [(1,), (0, 0), (0, 1)])
def test_shards_that_were_not_registered_are_refused(client: FakeClient, shards: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRange):
        client.lookup(digests(0), shards=shards)


def test_digests_that_do_not_divide_or_repeat_are_refused(client: FakeClient) -> None:
    with pytest.raises(InvalidRange):
        client.lookup(digests(0) + b"x")
    with pytest.raises(InvalidRange, match="twice"):
        client.lookup(digests(0, 1, 0))


@pytest.mark.behaviour("D036", "D124")
def test_chunks_of_one_lookup_are_limited(arena: MemoryArena) -> None:
    client = FakeClient(engine(arena, limits=LimitConfig(chunks=2)), arena).join()

    with pytest.raises(LimitExceeded, match="3 chunks in one request, the limit is 2"):
        client.lookup(digests(0, 1, 2))


@pytest.mark.behaviour("D036")
def test_leases_are_limited(arena: MemoryArena) -> None:
    client = FakeClient(engine(arena, limits=LimitConfig(leases=1)), arena).join()
    client.store(digests(0))
    client.lookup(digests(0), "one")

    with pytest.raises(Busy, match="leases are alive"):
        client.lookup(digests(0), "two")
    assert client.lookup(digests(0), "one")[1].chunks == 1, "a replaced lookup makes room for its successor"


@pytest.mark.behaviour("D036")
def test_requests_are_limited(arena: MemoryArena) -> None:
    client = FakeClient(engine(arena, limits=LimitConfig(sessions=1)), arena).join()
    client.lookup(digests(0), "one")

    with pytest.raises(Busy):
        client.lookup(digests(0), "two")
    client.engine.end_request(client.client_id, "one", 0.0)
    client.lookup(digests(0), "two")


@pytest.mark.behaviour("D011")
def test_a_second_lookup_of_a_request_replaces_the_first(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0, 1))
    client.store(digests(7))
    first, _ = client.lookup(digests(0, 1), "r")

    second, found = client.lookup(digests(7), "r")

    assert (found.chunks, pinned(eng), eng.numbers().leases) == (1, 1, 1)
    with pytest.raises(UnknownLease):
        eng.lookup_status(client.client_id, first, 0.0)
    assert eng.lookup_status(client.client_id, second, 0.0) == found


@pytest.mark.behaviour("D008")
def test_a_request_id_with_other_tokens_is_a_new_request(client: FakeClient) -> None:
    client.store(digests(0))
    client.lookup(digests(0), "r")

    assert client.lookup(digests(5), "r")[1].chunks == 0


def test_a_lookup_id_in_use_is_its_clients_alone(eng: Engine, arena: MemoryArena, client: FakeClient) -> None:
    client.store(digests(0))
    lookup_id, _ = client.lookup(digests(0), "a")
    other = FakeClient(eng, arena).join()

    with pytest.raises(InvalidRange):
        other.lookup(digests(0), "b", lookup_id)
    assert client.lookup(digests(0), "c", lookup_id)[1].chunks == 1
    assert eng.numbers().leases == 1


@pytest.mark.behaviour("R046", "R047", "R049", "R093", "D012")
def test_status_repeats_the_answer_and_consumes_nothing(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))
    lookup_id, found = client.lookup(digests(0, 1))

    assert [eng.lookup_status(client.client_id, lookup_id, 0.0) for _ in range(3)] == [found] * 3


@pytest.mark.behaviour("R047")
def test_status_of_an_unknown_lookup_is_an_error(eng: Engine, client: FakeClient) -> None:
    with pytest.raises(UnknownLease):
        eng.lookup_status(client.client_id, fresh_id(), 0.0)


@pytest.mark.behaviour("R001", "R045", "D018")
def test_each_reader_of_a_shard_has_its_own_pin(eng: Engine, arena: MemoryArena) -> None:
    client = FakeClient(eng, arena, readers=3).join()
    client.store(digests(0))
    lookup_id, _ = client.lookup(digests(0))

    for _ in range(2):
        assert client.vouch(lookup_id, 0, 1) == [Disposition.VOUCHED]
        assert pinned(eng) == 1
    assert client.vouch(lookup_id, 0, 1) == [Disposition.VOUCHED]

    assert pinned(eng) == 0
    assert eng.numbers().leases == 0


def test_more_than_the_share_is_not_pinned(arena: MemoryArena) -> None:
    eng = engine(arena, limits=LimitConfig(pinned_share=0.5, pinned_client_share=4 / 64))
    one, two = FakeClient(eng, arena).join(), FakeClient(eng, arena).join()
    one.store(digests(*range(40)))

    _, found = one.lookup(digests(*range(40)), "a")
    _, shared = one.lookup(digests(*range(40)), "b")
    _, other = two.lookup(digests(*range(40)), "a")

    assert (found.chunks, found.coming, found.reason) == (4, 0, LookupReason.PIN_LIMIT)
    assert shared.chunks == 4, "a prefix that is pinned already costs nothing"
    assert other.chunks == 4
    assert pinned(eng) == 4
    assert eng.numbers().counters['kvpool_lookups_total{reason="pin_limit"}'] == 3


def test_all_lookups_together_pin_no_more_than_their_share(arena: MemoryArena) -> None:
    eng = engine(arena, limits=LimitConfig(pinned_share=10 / 64, pinned_client_share=8 / 64))
    clients = [FakeClient(eng, arena).join() for _ in range(3)]
    for at, client in enumerate(clients):
        client.store(digests(*range(8), chain=at))

    found = [client.lookup(digests(*range(8), chain=at))[1].chunks for at, client in enumerate(clients)]

    assert found == [8, 2, 0]
    assert pinned(eng) == 10


# Hybrid models: chunk_tokens is 16


def hybrid(eng: Engine, arena: MemoryArena, kind: GroupKind, window_tokens: int = 0) -> FakeClient:
    second = GroupSpec(kind=kind, shard_bytes=PAGE, window_tokens=window_tokens)
    return FakeClient(eng, arena, groups=(FULL, second)).join()


def test_a_window_group_needs_only_its_window(eng: Engine, arena: MemoryArena) -> None:
    client = hybrid(eng, arena, GroupKind.WINDOW, 33)
    client.store(digests(*range(8)))
    client.store(digests(3, 4, 5), group=1, first=3)

    lookup_id, found = client.lookup(digests(*range(8)))

    assert (found.chunks, found.reason) == (6, LookupReason.INCOMPLETE)
    assert pinned(eng) == 6 + 3
    assert client.vouch(lookup_id, 3, 6, group=1) == [Disposition.VOUCHED] * 3
    assert client.vouch(lookup_id, 0, 6) == [Disposition.VOUCHED] * 6


def test_a_prefix_shorter_than_the_window_needs_all_of_it(eng: Engine, arena: MemoryArena) -> None:
    client = hybrid(eng, arena, GroupKind.WINDOW, 100)
    client.store(digests(0, 1, 2))
    client.store(digests(0, 1), group=1)

    assert client.lookup(digests(0, 1, 2))[1].chunks == 2


def test_a_window_with_a_gap_falls_back_to_what_is_whole(eng: Engine, arena: MemoryArena) -> None:
    client = hybrid(eng, arena, GroupKind.WINDOW, 32)
    client.store(digests(*range(6)))
    client.store(digests(0, 1, 2), group=1)
    client.store(digests(4), group=1, first=4)

    assert client.lookup(digests(*range(6)))[1].chunks == 3


def test_a_state_group_needs_the_last_chunk_alone(eng: Engine, arena: MemoryArena) -> None:
    client = hybrid(eng, arena, GroupKind.STATE)
    client.store(digests(*range(6)))
    client.store(digests(3), group=1, first=3)

    _, found = client.lookup(digests(*range(6)))

    assert found.chunks == 4
    assert pinned(eng) == 4 + 1


def test_rows_outside_the_window_are_not_held(eng: Engine, arena: MemoryArena) -> None:
    client = hybrid(eng, arena, GroupKind.STATE)
    client.store(digests(0, 1))
    client.store(digests(0, 1), group=1)
    lookup_id, _ = client.lookup(digests(0, 1))

    assert client.read(lookup_id, 0, 2, group=1).placements["disposition"].tolist() == [
        Disposition.LOST,
        Disposition.IN_PLACE,
    ]


@pytest.mark.behaviour("R043")
def test_what_was_used_is_evicted_last(arena: MemoryArena) -> None:
    eng = engine(arena)
    client = FakeClient(eng, arena).join()
    for chain in range(8):
        client.store(digests(*range(8), chain=chain))
    client.found(digests(*range(8), chain=0))

    client.store(digests(*range(8), chain=9))

    assert [client.found(digests(*range(8), chain=chain)) for chain in (0, 1, 2, 9)] == [8, 0, 8, 8]
