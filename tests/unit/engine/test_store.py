# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, digests, engine, fresh_id, namespace

from kvpool.config import LimitConfig
from kvpool.engine.engine import Engine
from kvpool.model.errors import Busy, InvalidRange, LimitExceeded, Malformed, NotRegistered, UnknownLease
from kvpool.model.identity import GroupKind, GroupSpec, Mode
from kvpool.model.slots import NO_DIGEST, Disposition

STORED, ABANDONED = Disposition.STORED, Disposition.ABANDONED
WRITE, PRESENT, PENDING = Disposition.WRITE, Disposition.PRESENT, Disposition.PENDING


@pytest.mark.behaviour("R024")
def test_a_chunk_is_visible_once_it_is_committed(client: FakeClient) -> None:
    store_id, rows = client.prepare(digests(0, 1))
    assert rows["disposition"].tolist() == [WRITE, WRITE]
    assert client.found(digests(0, 1)) == 0

    assert client.commit(store_id, rows) == [STORED, STORED]

    assert client.found(digests(0, 1)) == 2


@pytest.mark.behaviour("R016", "R017")
def test_what_is_there_is_not_to_be_sent(client: FakeClient) -> None:
    client.store(digests(1), first=1)

    store_id, rows = client.prepare(digests(0, 1, 2))

    assert rows["disposition"].tolist() == [WRITE, PRESENT, WRITE]
    assert rows["slot"][1] == -1
    assert client.commit(store_id, rows) == [STORED, PRESENT, STORED]
    assert client.found(digests(0, 1, 2)) == 3


def test_what_another_writes_is_not_to_be_sent(eng: Engine, arena: MemoryArena, client: FakeClient) -> None:
    other = FakeClient(eng, arena).join()
    client.prepare(digests(0))

    assert other.prepare(digests(0, 1))[1]["disposition"].tolist() == [PENDING, WRITE]


def test_a_store_with_nothing_to_send_is_over_at_once(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))
    store_id, rows = client.prepare(digests(0))

    assert eng.numbers().leases == 0
    with pytest.raises(UnknownLease):
        client.commit(store_id, rows)


@pytest.mark.behaviour("R012", "R075")
def test_a_store_is_of_its_group_and_shard_alone(eng: Engine, arena: MemoryArena) -> None:
    client = FakeClient(eng, arena, space=namespace(shard_count=2), shards=(0, 1)).join()

    client.store(digests(0), shard=1)

    assert client.prepare(digests(0), shard=0)[1]["disposition"].tolist() == [WRITE]
    assert client.prepare(digests(0), shard=1)[1]["disposition"].tolist() == [PRESENT]


def test_placements_say_where_the_bytes_go(client: FakeClient, arena: MemoryArena) -> None:
    _, rows = client.prepare(digests(0, 1))

    for row in rows:
        assert row["memory"] == row["slot"] // arena.stride
        assert row["offset"] == (row["slot"] % arena.stride) * PAGE
        assert row["length"] == PAGE


def test_the_header_tells_the_whole_key(client: FakeClient, arena: MemoryArena) -> None:
    client.store(digests(4), first=4)
    store_id, rows = client.prepare(digests(4, 5, 6), first=4, parent=digests(3))
    header = arena.rows(rows["slot"][1:])
    client.commit(store_id, rows, bytes(range(48)))

    assert header["digest"].tolist() == [digests(5), digests(6)]
    assert header["parent"].tolist() == [digests(4), digests(5)]
    assert header["ordinal"].tolist() == [5, 6]
    assert header["writer"].tolist() == [client.client_id] * 2
    assert header["length"].tolist() == [PAGE, PAGE]
    assert arena.rows(rows["slot"][1:])["checksum"].tolist() == [bytes(range(16, 32)), bytes(range(32, 48))]


def test_a_first_chunk_has_no_parent(client: FakeClient, arena: MemoryArena) -> None:
    _, rows = client.prepare(digests(0))

    assert arena.rows(rows["slot"])["parent"].tolist() == [NO_DIGEST]


@pytest.mark.behaviour("D002", "D003")
def test_chunks_not_marked_complete_are_dropped(eng: Engine, client: FakeClient) -> None:
    store_id, _ = client.prepare(digests(0, 1, 2))

    answer = eng.commit_store(client.client_id, store_id, bytes([1, 0, 1]), b"", 0, 0.0)

    assert answer.tolist() == [STORED, ABANDONED, STORED]
    assert client.found(digests(0, 1, 2)) == 1
    assert eng.numbers().slots_used == 2
    assert client.prepare(digests(1), first=1)[1]["disposition"].tolist() == [WRITE]


def test_a_store_is_committed_once(client: FakeClient) -> None:
    store_id, rows = client.prepare(digests(0))
    client.commit(store_id, rows)

    with pytest.raises(UnknownLease):
        client.commit(store_id, rows)


def test_a_store_is_its_clients_alone(eng: Engine, arena: MemoryArena, client: FakeClient) -> None:
    store_id, rows = client.prepare(digests(0))
    other = FakeClient(eng, arena).join()

    with pytest.raises(UnknownLease):
        other.commit(store_id, rows)
    assert other.prepare(digests(1), store_id=store_id)[1]["disposition"].tolist() == [WRITE]
    assert client.commit(store_id, rows) == [STORED]


def test_a_store_id_is_used_once_at_a_time(client: FakeClient) -> None:
    store_id, _ = client.prepare(digests(0))

    with pytest.raises(InvalidRange, match="in use"):
        client.prepare(digests(1), store_id=store_id)


def test_chunks_with_and_without_a_checksum_are_committed_together(
    eng: Engine, client: FakeClient, arena: MemoryArena
) -> None:
    store_id, rows = client.prepare(digests(0, 1, 2))
    sums = bytes(range(48))

    ends = eng.commit_store(client.client_id, store_id, b"\1\0\1", sums, np.array([1, 0, 0], dtype=np.uint8), 0.0)

    assert ends.tolist() == [STORED, ABANDONED, STORED]
    kept = arena.rows(rows["slot"][[0, 2]])
    assert kept["checksum_kind"].tolist() == [1, 0]
    assert kept["checksum"][0].tobytes() == bytes(range(16))


@pytest.mark.parametrize("kinds", [[1], [1, 1, 1], [1, 9]], ids=str)
def test_kinds_that_are_not_one_a_chunk_or_not_known_are_refused(
    eng: Engine, client: FakeClient, kinds: list[int]
) -> None:
    store_id, _ = client.prepare(digests(0, 1))

    with pytest.raises(Malformed):
        eng.commit_store(client.client_id, store_id, b"\1\1", bytes(32), np.array(kinds, dtype=np.uint8), 0.0)


@pytest.mark.parametrize(
    ("marks", "sums", "kind"),
    [(b"\1", b"", 0), (b"\1\1", b"x" * 16, 1), (b"\1\1", b"", 1), (b"\1\1", b"x" * 32, 99)],
)
def test_a_commit_with_wrong_frames_is_refused_and_may_be_repeated(
    eng: Engine, client: FakeClient, marks: bytes, sums: bytes, kind: int
) -> None:
    store_id, rows = client.prepare(digests(0, 1))

    with pytest.raises(Malformed):
        eng.commit_store(client.client_id, store_id, marks, sums, kind, 0.0)
    assert client.commit(store_id, rows) == [STORED, STORED]


@pytest.mark.parametrize(
    ("group", "shard", "first", "parent"),
    [(1, 0, 0, b""), (-1, 0, 0, b""), (0, 1, 0, b""), (0, 0, 1 << 40, b""), (0, 0, -1, b""), (0, 0, 1, b"short")],
)
@pytest.mark.behaviour("R011")
def test_places_that_were_not_registered_are_refused(
    client: FakeClient, group: int, shard: int, first: int, parent: bytes
) -> None:
    with pytest.raises(InvalidRange):
        client.prepare(digests(0), first, group, shard, parent=parent)


def test_a_store_of_no_chunks_is_refused(client: FakeClient) -> None:
    with pytest.raises(InvalidRange):
        client.prepare(b"")


@pytest.mark.behaviour("D036")
def test_chunks_and_leases_are_limited(arena: MemoryArena) -> None:
    client = FakeClient(engine(arena, limits=LimitConfig(chunks=2, leases=1)), arena).join()

    with pytest.raises(LimitExceeded):
        client.prepare(digests(0, 1, 2))
    client.prepare(digests(0))
    with pytest.raises(Busy):
        client.prepare(digests(1))


@pytest.mark.behaviour("D106", "D108")
def test_an_expired_store_is_unreadable_for_ever_and_held_until_its_writer_says_so(
    eng: Engine, client: FakeClient, arena: MemoryArena
) -> None:
    arena.outside_writers = {0, 1, 2, 3}
    store_id, rows = client.prepare(digests(0, 1))
    eng.tick(60.0)
    assert eng.numbers().leases == 0
    assert eng.numbers().quarantined_bytes == 2 * PAGE

    assert client.found(digests(0, 1), 60.0) == 0
    assert client.commit(store_id, rows, now_s=61.0) == [ABANDONED, ABANDONED]

    assert client.found(digests(0, 1), 62.0) == 0
    assert eng.numbers().slots_used == 0
    assert eng.numbers().counters['kvpool_expired_leases_total{kind="store"}'] == 1


def test_the_key_of_an_expired_store_may_be_stored_again(eng: Engine, client: FakeClient, arena: MemoryArena) -> None:
    arena.outside_writers = {0, 1, 2, 3}
    _, rows = client.prepare(digests(0))
    eng.tick(60.0)

    again, new_rows = client.prepare(digests(0), now_s=60.0)

    assert new_rows["slot"][0] != rows["slot"][0], "the former writer may still write to its slot"
    assert client.commit(again, new_rows, now_s=60.0) == [STORED]
    assert client.found(digests(0), 60.0) == 1


@pytest.mark.parametrize("proof", ["region", "unregister", "death", "hello"])
@pytest.mark.behaviour("D014", "D058")
def test_a_slot_that_a_lost_client_may_write_is_freed_by_proof_alone(
    eng: Engine, client: FakeClient, arena: MemoryArena, proof: str
) -> None:
    arena.outside_writers = {0, 1, 2, 3}
    client.prepare(digests(0))
    if proof == "unregister":
        eng.tick(60.0)
    else:
        eng.client_lost(client.client_id, 1.0, proven_dead=False)
    eng.tick(61.0)
    assert eng.numbers().quarantined_bytes == PAGE

    if proof == "region":
        arena.outside_writers = set()
        eng.tick(62.0)
    elif proof == "unregister":
        assert eng.unregister(client.client_id, 62.0)
    elif proof == "death":
        eng.writers_proven_dead(client.client_id, 62.0)
    else:
        client.join(62.0)

    assert (eng.numbers().quarantined_bytes, eng.numbers().slots_used) == (0, 0)


def test_a_clients_hello_frees_nobody_elses_slots(eng: Engine, client: FakeClient, arena: MemoryArena) -> None:
    arena.outside_writers = {0, 1, 2, 3}
    other = FakeClient(eng, arena).join()
    client.prepare(digests(0))
    eng.client_lost(client.client_id, 1.0, proven_dead=False)

    other.join(2.0)
    eng.writers_proven_dead(other.client_id, 2.0)

    assert eng.numbers().quarantined_bytes == PAGE


def test_proof_of_death_frees_at_once(eng: Engine, client: FakeClient, arena: MemoryArena) -> None:
    arena.outside_writers = {0, 1, 2, 3}
    client.prepare(digests(0))

    eng.client_lost(client.client_id, 1.0, proven_dead=True)

    assert eng.numbers().slots_used == 0


def test_after_a_lost_connection_a_store_cannot_be_committed(eng: Engine, client: FakeClient) -> None:
    store_id, rows = client.prepare(digests(0))
    eng.client_lost(client.client_id, 1.0, proven_dead=False)

    with pytest.raises(NotRegistered):
        client.commit(store_id, rows)
    client.join(2.0)
    with pytest.raises(UnknownLease):
        client.commit(store_id, rows)
    assert client.found(digests(0), 2.0) == 0


@pytest.mark.behaviour("D009")
def test_a_store_after_the_end_of_its_request_leaves_no_session(eng: Engine, client: FakeClient) -> None:
    eng.end_request(client.client_id, "r", 0.0)

    assert client.store(digests(0)) == [STORED]

    assert (eng.numbers().sessions, eng.numbers().leases) == (0, 0)


@pytest.mark.behaviour("R025")
def test_two_ranks_store_side_by_side(eng: Engine, arena: MemoryArena) -> None:
    ranks = [FakeClient(eng, arena, space=namespace(shard_count=2), shards=(r,)).join() for r in (0, 1)]
    scheduler = FakeClient(eng, arena, space=namespace(shard_count=2), shards=(0, 1)).join()
    begun = [rank.prepare(digests(0, 1), shard=r) for r, rank in enumerate(ranks)]
    for (store_id, rows), rank in zip(begun, ranks, strict=True):
        rank.commit(store_id, rows)

    assert scheduler.found(digests(0, 1)) == 2


@pytest.mark.behaviour("R002", "D118")
def test_groups_of_different_sizes_live_side_by_side(eng: Engine, arena: MemoryArena) -> None:
    groups = tuple(GroupSpec(kind=GroupKind.FULL, shard_bytes=n) for n in (100, PAGE + 1, 3 * PAGE))
    client = FakeClient(eng, arena, groups=groups).join()

    for group in range(3):
        assert client.store(digests(0, 1), group=group) == [STORED, STORED]

    assert client.found(digests(0, 1)) == 2
    assert eng.numbers().used_bytes == 2 * (1 + 2 + 3) * PAGE


# Streamed


@pytest.fixture
def streamed(eng: Engine, arena: MemoryArena) -> FakeClient:
    return FakeClient(eng, arena, mode=Mode.STREAMED).join()


def send(client: FakeClient, store_id: bytes, chunk: int, pieces: list[int], *, ok: bool = True) -> None:
    offset = 0
    for size in pieces:
        target = client.engine.begin_write(client.client_id, store_id, chunk, offset, size)
        target[:] = bytes([chunk + 1]) * size
        client.engine.end_write(client.client_id, store_id, chunk, size, 0.0, ok=ok)
        offset += size


@pytest.mark.behaviour("R003")
def test_pieces_make_a_chunk(streamed: FakeClient, arena: MemoryArena) -> None:
    store_id, rows = streamed.prepare(digests(5, 6), first=5)
    send(streamed, store_id, 5, [1000, PAGE - 1000])
    send(streamed, store_id, 6, [PAGE])

    assert streamed.commit(store_id, rows) == [STORED, STORED]
    assert bytes(arena.view(int(rows["slot"][1]))) == bytes([7]) * PAGE


def test_the_last_page_of_a_slot_is_not_the_chunks(eng: Engine, arena: MemoryArena) -> None:
    client = FakeClient(
        eng, arena, mode=Mode.STREAMED, groups=(GroupSpec(kind=GroupKind.FULL, shard_bytes=PAGE - 10),)
    ).join()
    store_id, _ = client.prepare(digests(0))

    with pytest.raises(InvalidRange):
        eng.begin_write(client.client_id, store_id, 0, 0, PAGE)
    assert len(eng.begin_write(client.client_id, store_id, 0, 0, PAGE - 10)) == PAGE - 10
    eng.end_write(client.client_id, store_id, 0, PAGE - 10, 0.0)


@pytest.mark.behaviour("D002", "D003")
def test_a_chunk_with_missing_or_failed_pieces_is_not_kept(streamed: FakeClient) -> None:
    store_id, rows = streamed.prepare(digests(0, 1, 2))
    send(streamed, store_id, 0, [PAGE])
    send(streamed, store_id, 1, [PAGE - 1])
    send(streamed, store_id, 2, [PAGE], ok=False)

    assert streamed.commit(store_id, rows) == [STORED, ABANDONED, ABANDONED]
    assert streamed.found(digests(0, 1, 2)) == 1


@pytest.mark.behaviour("R003")
@pytest.mark.parametrize(("offset", "length"), [(1, 10), (0, 0), (0, PAGE + 1), (-1, 5)])
def test_pieces_that_do_not_continue_are_refused(streamed: FakeClient, offset: int, length: int) -> None:
    store_id, _ = streamed.prepare(digests(0))

    with pytest.raises(InvalidRange):
        streamed.engine.begin_write(streamed.client_id, store_id, 0, offset, length)


def test_a_piece_is_not_sent_twice(streamed: FakeClient) -> None:
    store_id, _ = streamed.prepare(digests(0))
    send(streamed, store_id, 0, [100])

    with pytest.raises(InvalidRange, match="100 came before"):
        streamed.engine.begin_write(streamed.client_id, store_id, 0, 0, 100)


def test_only_chunks_to_be_written_are_taken(streamed: FakeClient) -> None:
    store_id, rows = streamed.prepare(digests(0))
    send(streamed, store_id, 0, [PAGE])
    streamed.commit(store_id, rows)
    store_id, _ = streamed.prepare(digests(0, 1))

    for chunk in (0, 2, -1):
        with pytest.raises(InvalidRange):
            streamed.engine.begin_write(streamed.client_id, store_id, chunk, 0, 1)


def test_a_client_that_writes_itself_sends_nothing(client: FakeClient) -> None:
    store_id, _ = client.prepare(digests(0))

    with pytest.raises(InvalidRange):
        client.engine.begin_write(client.client_id, store_id, 0, 0, 1)


def test_writes_to_unknown_stores_are_refused(streamed: FakeClient) -> None:
    with pytest.raises(UnknownLease):
        streamed.engine.begin_write(streamed.client_id, fresh_id(), 0, 0, 1)
    with pytest.raises(UnknownLease):
        streamed.engine.end_write(streamed.client_id, fresh_id(), 0, 1, 0.0)


@pytest.mark.parametrize("end", ["commit", "expiry", "loss", "unregister"])
@pytest.mark.behaviour("D014", "D024")
def test_a_running_copy_holds_its_slot_whatever_ends(streamed: FakeClient, arena: MemoryArena, end: str) -> None:
    eng = streamed.engine
    store_id, rows = streamed.prepare(digests(0, 1))
    eng.begin_write(streamed.client_id, store_id, 1, 0, 10)

    if end == "commit":
        assert streamed.commit(store_id, rows) == [ABANDONED, ABANDONED]
    elif end == "expiry":
        eng.tick(60.0)
    elif end == "loss":
        eng.client_lost(streamed.client_id, 1.0, proven_dead=True)
    else:
        eng.unregister(streamed.client_id, 1.0)

    assert eng.numbers().slots_used == 1
    eng.end_write(streamed.client_id, store_id, 1, 10, 61.0)
    assert eng.numbers().slots_used == 0


def test_an_idle_streamed_store_is_freed_with_its_lease(streamed: FakeClient) -> None:
    streamed.prepare(digests(0))

    streamed.engine.tick(60.0)

    assert streamed.engine.numbers().slots_used == 0


def test_two_pieces_may_be_under_way(streamed: FakeClient) -> None:
    eng, cid = streamed.engine, streamed.client_id
    store_id, rows = streamed.prepare(digests(0))
    for offset in (0, PAGE // 2):
        eng.begin_write(cid, store_id, 0, offset, PAGE // 2)
    for _ in range(2):
        eng.end_write(cid, store_id, 0, PAGE // 2, 0.0)

    assert streamed.commit(store_id, rows) == [STORED]


def test_marks_may_come_as_an_array(client: FakeClient) -> None:
    store_id, _ = client.prepare(digests(0))

    marks = np.ones(1, dtype=np.uint8)

    assert client.engine.commit_store(client.client_id, store_id, marks, memoryview(b""), 0, 0.0).tolist() == [STORED]
