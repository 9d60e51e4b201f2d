# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, digests, engine, fresh_id, namespace

from kvpool.config import L1Config
from kvpool.engine.engine import Engine
from kvpool.model.checksum import PREFERRED, checksum
from kvpool.model.errors import InvalidRange, LimitExceeded, Malformed, UnknownLease
from kvpool.model.identity import Mode
from kvpool.model.slots import Disposition

VOUCHED, LOST = Disposition.VOUCHED, Disposition.LOST
ALL = 1 << 31


@pytest.fixture
def held(client: FakeClient) -> bytes:
    """A lookup that holds chunks 0 to 2."""
    client.store(digests(0, 1, 2), b"data")
    return client.lookup(digests(0, 1, 2), "r")[0]


@pytest.mark.behaviour("R028")
def test_says_where_the_chunks_lie(client: FakeClient, arena: MemoryArena, held: bytes) -> None:
    plan = client.read(held, 1, 3)

    assert plan.placements["disposition"].tolist() == [Disposition.IN_PLACE] * 2
    for row in plan.placements:
        region, position = divmod(int(row["slot"]), arena.stride)
        assert (row["memory"], row["offset"]) == (region, position * PAGE)
        assert bytes(arena.view(int(row["slot"]))[:4]) == b"data"
        assert row["length"] == PAGE


def test_a_worker_presents_the_schedulers_lookup(eng: Engine, arena: MemoryArena, held: bytes) -> None:
    worker = FakeClient(eng, arena).join()

    assert len(worker.read(held, 0, 3).placements) == 3
    assert worker.vouch(held, 0, 3) == [VOUCHED] * 3


@pytest.mark.behaviour("D050", "D121")
def test_other_tenants_and_namespaces_cannot_use_it(eng: Engine, arena: MemoryArena, held: bytes) -> None:
    for stranger in (
        FakeClient(eng, arena, tenant="other").join(),
        FakeClient(eng, arena, space=namespace("other")).join(),
    ):
        with pytest.raises(UnknownLease):
            stranger.read(held, 0, 1)
        with pytest.raises(UnknownLease):
            eng.lookup_status(stranger.client_id, held, 0.0)
        assert stranger.vouch(held, 0, 1) == [LOST]
        assert eng.free_lookup(stranger.client_id, held, 0, ALL, 0.0) == 0
    assert eng.numbers().pinned_bytes == 3 * PAGE


def test_a_client_that_does_not_map_it_is_sent_it(eng: Engine, arena: MemoryArena, held: bytes) -> None:
    streamed = FakeClient(eng, arena, mode=Mode.STREAMED).join()

    assert set(streamed.read(held, 0, 3).placements["disposition"].tolist()) == {Disposition.STREAM}


def test_what_was_streamed_in_is_streamed_out(eng: Engine, arena: MemoryArena, client: FakeClient) -> None:
    writer = FakeClient(eng, arena, mode=Mode.STREAMED).join()
    store_id, rows = writer.prepare(digests(7))
    eng.begin_write(writer.client_id, store_id, 0, 0, PAGE)[:] = bytes(PAGE)
    eng.end_write(writer.client_id, store_id, 0, PAGE, 0.0)
    writer.commit(store_id, rows)
    lookup_id, _ = client.lookup(digests(7))

    assert client.read(lookup_id, 0, 1).placements["disposition"].tolist() == [Disposition.STREAM]


@pytest.mark.parametrize(("first", "end"), [(0, 4), (-1, 1), (2, 2), (2, 1)])
@pytest.mark.behaviour("R055", "D038")
def test_ranges_outside_what_was_found_are_refused(client: FakeClient, held: bytes, first: int, end: int) -> None:
    with pytest.raises(InvalidRange):
        client.read(held, first, end)


@pytest.mark.behaviour("D038")
def test_what_was_asked_for_and_not_found_is_outside(client: FakeClient) -> None:
    client.store(digests(0, 1))
    lookup_id, found = client.lookup(digests(0, 1, 2), "r")
    assert found.chunks == 2

    for first, end in ((0, 3), (2, 3)):
        with pytest.raises(InvalidRange):
            client.read(lookup_id, first, end)
        with pytest.raises(InvalidRange):
            client.vouch(lookup_id, first, end)


def test_groups_and_shards_that_were_not_asked_for_are_refused(client: FakeClient, held: bytes) -> None:
    for group, shard in ((1, 0), (0, 1)):
        with pytest.raises(InvalidRange):
            client.read(held, 0, 1, group, shard)
        with pytest.raises(InvalidRange):
            client.vouch(held, 0, 1, group, shard)


@pytest.mark.behaviour("R034", "D021")
def test_a_commit_releases_its_range_alone(eng: Engine, client: FakeClient, held: bytes) -> None:
    assert client.vouch(held, 0, 2) == [VOUCHED, VOUCHED]
    assert eng.numbers().pinned_bytes == PAGE
    assert client.read(held, 0, 3).placements["disposition"].tolist() == [LOST, LOST, Disposition.IN_PLACE]

    assert client.vouch(held, 0, 3) == [LOST, LOST, VOUCHED]

    assert (eng.numbers().pinned_bytes, eng.numbers().leases) == (0, 0)


@pytest.mark.behaviour("R035")
def test_a_second_commit_releases_nothing_and_vouches_for_nothing(client: FakeClient, held: bytes) -> None:
    client.vouch(held, 0, 3)

    assert client.vouch(held, 0, 3) == [LOST] * 3


@pytest.mark.behaviour("D054")
def test_after_expiry_nothing_is_vouched_for(eng: Engine, client: FakeClient, held: bytes) -> None:
    client.read(held, 0, 3, now_s=1.0)
    eng.tick(61.0)

    assert client.vouch(held, 0, 3, now_s=61.0) == [LOST] * 3
    with pytest.raises(UnknownLease):
        client.read(held, 0, 3, now_s=61.0)
    assert eng.numbers().counters['kvpool_expired_leases_total{kind="lookup"}'] == 1


def test_a_load_that_begins_gives_the_lookup_new_time(eng: Engine, client: FakeClient, held: bytes) -> None:
    client.read(held, 0, 3, now_s=59.0)
    eng.tick(100.0)

    assert client.vouch(held, 0, 3, now_s=100.0) == [VOUCHED] * 3


def test_an_unknown_lookup_is_lost(client: FakeClient) -> None:
    assert client.vouch(fresh_id(), 0, 2) == [LOST, LOST]


def test_commits_with_wrong_marks_or_ranges_are_refused(client: FakeClient, held: bytes) -> None:
    with pytest.raises(Malformed):
        client.vouch(held, 0, 2, bad=[0])
    for first, end in ((0, 1 << 30), (1, 1), (-1, 1)):
        with pytest.raises(LimitExceeded):
            client.vouch(held, first, end, bad=[0])
    with pytest.raises(InvalidRange):
        client.vouch(held, 0, 4)


@pytest.mark.behaviour("R028", "D024")
def test_a_forced_clear_fails_the_load_and_leaves_the_bytes(
    eng: Engine, client: FakeClient, arena: MemoryArena, held: bytes
) -> None:
    slot = int(client.read(held, 0, 1).placements["slot"][0])

    assert eng.clear("t", "", True, 0.0).chunks == 3

    assert bytes(arena.view(slot)[:4]) == b"data"
    assert client.read(held, 0, 1).placements["disposition"].tolist() == [LOST]
    assert eng.numbers().slots_used == 3
    assert client.vouch(held, 0, 3) == [LOST] * 3
    assert eng.numbers().slots_used == 0


def test_a_chunk_with_a_wrong_checksum_is_never_found_again(eng: Engine, client: FakeClient, held: bytes) -> None:
    assert client.vouch(held, 0, 3, bad=[0, 1, 0]) == [VOUCHED, LOST, VOUCHED]

    assert client.found(digests(0, 1, 2)) == 1
    assert eng.numbers().counters["kvpool_checksum_mismatches_total"] == 1
    assert eng.numbers().slots_used == 2


def test_what_a_mover_found_damaged_is_never_found_again_and_counted_once(
    eng: Engine, client: FakeClient, held: bytes
) -> None:
    slots = client.read(held, 0, 3).placements["slot"].astype(np.int64)
    eng.movers.hold(slots)
    eng.movers.damaged(slots[1:2])
    eng.movers.damaged(slots[1:2])

    assert client.vouch(held, 0, 3, bad=[0, 1, 0]) == [VOUCHED, LOST, VOUCHED]
    assert client.found(digests(0, 1, 2)) == 1
    assert eng.numbers().counters["kvpool_checksum_mismatches_total"] == 1
    assert eng.numbers().slots_used == 3, "the mover may still read it"
    eng.movers.let_go(slots)
    assert eng.numbers().slots_used == 2


def test_checksums_are_shown_for_a_share_of_loads(arena: MemoryArena) -> None:
    client = FakeClient(engine(arena, l1=L1Config(verify_loads=0.25)), arena).join()
    client.store(digests(0), b"data")
    lookup_id, _ = client.lookup(digests(0))

    plans = [client.read(lookup_id, 0, 1) for _ in range(8)]

    assert [int(plan.kinds[0]) for plan in plans] == [0, 0, 0, PREFERRED] * 2
    assert plans[3].checksums[0].tobytes() == checksum(b"data".ljust(PAGE, b"."))


# Streamed reads


def test_a_piece_is_what_was_asked(client: FakeClient, eng: Engine, held: bytes) -> None:
    read = eng.begin_read(client.client_id, held, 0, 0, 1, 2, 3, 0.0)

    assert read() == b"ta."
    eng.end_read(client.client_id, held, 0, 0, 1, 2, 3, 0.0)


@pytest.mark.parametrize(("chunk", "offset", "length"), [(3, 0, 1), (0, -1, 1), (0, 0, 0), (0, PAGE, 1)])
def test_pieces_outside_a_chunk_are_refused(
    client: FakeClient, eng: Engine, held: bytes, chunk: int, offset: int, length: int
) -> None:
    with pytest.raises(InvalidRange):
        eng.begin_read(client.client_id, held, 0, 0, chunk, offset, length, 0.0)


def test_a_released_chunk_is_not_read(client: FakeClient, eng: Engine, held: bytes) -> None:
    client.vouch(held, 0, 1)

    with pytest.raises(UnknownLease):
        eng.begin_read(client.client_id, held, 0, 0, 0, 0, 1, 0.0)


@pytest.mark.parametrize("end", ["expiry", "free", "loss", "clear"])
@pytest.mark.behaviour("D024", "R034")
def test_a_running_copy_keeps_its_chunk(client: FakeClient, eng: Engine, held: bytes, end: str) -> None:
    read = eng.begin_read(client.client_id, held, 0, 0, 0, 0, 4, 0.0)
    match end:
        case "expiry":
            eng.tick(60.0)
        case "free":
            eng.free_lookup(client.client_id, held, 0, ALL, 0.0)
        case "loss":
            eng.client_lost(client.client_id, 0.0, proven_dead=True)
        case _:
            eng.end_request(client.client_id, "r", 0.0)
            eng.clear("t", "", True, 0.0)
    other = FakeClient(eng, client.arena).join(60.0)
    other.store(digests(*range(63), chain=5), b"new!", now_s=60.0)

    assert read() == b"data"
    assert eng.numbers().pinned_bytes == PAGE
    eng.end_read(client.client_id, held, 0, 0, 0, 0, 4, 60.0)
    assert eng.numbers().pinned_bytes == 0


def test_only_running_copies_end(client: FakeClient, eng: Engine, held: bytes) -> None:
    with pytest.raises(UnknownLease):
        eng.end_read(client.client_id, held, 0, 0, 0, 0, 1, 0.0)
