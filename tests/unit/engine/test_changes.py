# SPDX-License-Identifier: Apache-2.0
"""Cache events: what is told adds up to what is there, whoever asks when."""

from random import Random

import pytest
from tests.fakes.arena import MemoryArena
from tests.fakes.engines import FakeClient, digests, namespace

from kvpool.engine import changes
from kvpool.engine.engine import Engine
from kvpool.index.journal import Journal
from kvpool.model.errors import NotRegistered
from kvpool.model.keys import digest_list


class Listener:
    """Keeps what it is told."""

    def __init__(self, eng: Engine, client: FakeClient) -> None:
        self.eng, self.client, self.after, self.told, self.snapshots = eng, client, 0, set(), 0

    def listen(self, now_s: float = 0.0) -> set[bytes]:
        while True:
            batch = self.eng.changes.take(self.client.client_id, self.after, now_s)
            self.after = batch.sequence
            if batch.snapshot:
                self.told, self.snapshots = set(), self.snapshots + 1
            for stored, digest in zip(batch.stored, digest_list(batch.digests), strict=True):
                self.told.add(digest) if stored else self.told.discard(digest)
            if not batch.more:
                return self.told


def names(*numbers: int) -> set[bytes]:
    return set(digest_list(digests(*numbers)))


def test_what_was_there_before_is_a_snapshot_and_what_follows_is_events(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0, 1))
    listener = Listener(eng, client)
    assert listener.listen() == names(0, 1)

    client.store(digests(0, 1, 2))
    assert listener.listen() == names(0, 1, 2)
    eng.clear(None, "", True, 0.0)
    assert listener.listen() == set()
    client.store(digests(1))
    assert listener.listen() == names(1)
    assert listener.snapshots == 1


def test_a_store_under_way_is_not_told_and_an_abandoned_one_never_was(eng: Engine, client: FakeClient) -> None:
    listener = Listener(eng, client)
    listener.listen()
    store_id, rows = client.prepare(digests(0))
    assert listener.listen() == set()

    eng.commit_store(client.client_id, store_id, b"\0", b"", 0, 0.0)
    before = listener.after

    assert listener.listen() == set()
    assert listener.after == before
    assert len(rows) == 1


def test_another_tenants_and_another_namespaces_chunks_are_none_of_ours(
    eng: Engine, client: FakeClient, arena: MemoryArena
) -> None:
    others = [
        FakeClient(eng, arena, tenant="else").join(),
        FakeClient(eng, arena, space=namespace("another model")).join(),
    ]
    listener = Listener(eng, client)
    listener.listen()
    for other in others:
        other.store(digests(7))
        Listener(eng, other).listen()
        other.store(digests(8))

    assert listener.listen() == set()


@pytest.mark.behaviour("D120")
def test_who_fell_behind_gets_a_snapshot_and_no_gap(eng: Engine, client: FakeClient) -> None:
    eng._core.index.journal = Journal(kept=2)
    listener = Listener(eng, client)
    listener.listen()
    client.store(digests(0, 1, 2))

    assert listener.listen() == names(0, 1, 2)
    assert listener.snapshots == 2


def test_who_was_not_heard_of_for_long_begins_anew(eng: Engine, client: FakeClient, arena: MemoryArena) -> None:
    other = FakeClient(eng, arena).join()
    listener, second = Listener(eng, client), Listener(eng, other)
    listener.listen(0.0)
    second.listen(changes.IDLE_S + 1)
    assert eng._core.index.journal.watched, "the other one still listens"
    client.store(digests(0), now_s=changes.IDLE_S + 1)

    assert listener.listen(changes.IDLE_S + 2) == names(0)
    assert listener.snapshots == 2


@pytest.mark.behaviour("D122")
def test_who_registers_another_namespace_begins_anew_with_its_chunks(
    eng: Engine, client: FakeClient, arena: MemoryArena
) -> None:
    FakeClient(eng, arena, space=namespace("another model")).join().store(digests(7))
    client.store(digests(0))
    listener = Listener(eng, client)
    assert listener.listen() == names(0)

    client.space = namespace("another model")
    client.join()

    assert listener.listen() == names(7)
    assert listener.snapshots == 2


def test_nothing_is_noted_while_nobody_listens(eng: Engine, client: FakeClient) -> None:
    client.store(digests(0))

    assert eng._core.index.journal.sequence == 0


def test_a_snapshot_comes_in_pages_and_what_happens_meanwhile_behind_it(
    eng: Engine, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "PAGE", 2)
    client.store(digests(0, 1, 2, 3, 4))
    first = eng.changes.take(client.client_id, 0, 0.0)
    assert (first.snapshot, first.more, len(first.stored)) == (True, True, 2)
    client.store(digests(0, 1, 2, 3, 4, 5))

    listener = Listener(eng, client)
    listener.after, listener.told = first.sequence, set(digest_list(first.digests))

    assert listener.listen() == names(0, 1, 2, 3, 4)
    assert listener.listen() == names(0, 1, 2, 3, 4, 5)
    assert listener.snapshots == 0


@pytest.mark.behaviour("D122")
def test_more_events_than_one_answer_holds_come_in_the_next_ones(
    eng: Engine, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "PAGE", 2)
    listener = Listener(eng, client)
    listener.listen()
    client.store(digests(0, 1, 2, 3, 4))

    assert listener.listen() == names(0, 1, 2, 3, 4)
    assert listener.snapshots == 1


def test_a_chunk_is_announced_with_its_piece_of_the_first_shard(eng: Engine, arena: MemoryArena) -> None:
    client = FakeClient(eng, arena, space=namespace(shard_count=2), shards=(1, 0)).join()
    listener = Listener(eng, client)
    listener.listen()

    client.store(digests(0), shard=1)
    assert listener.listen() == set()
    client.store(digests(0), shard=0)

    assert listener.listen() == names(0)


def test_a_client_that_did_not_register_is_told_so(eng: Engine) -> None:
    with pytest.raises(NotRegistered):
        eng.changes.take(b"x" * 16, 0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_at_any_moment_what_was_told_is_what_is_there(eng: Engine, client: FakeClient, seed: int) -> None:
    """Stores, evictions and clears at random; the engine is small, so that most stores evict something."""
    random = Random(seed)
    eng._core.index.journal = Journal(kept=random.choice([3, 1000]))
    listener = Listener(eng, client)
    for _ in range(60):
        first = random.randrange(50)
        client.store(digests(*range(first, first + random.randrange(1, 6))))
        if random.random() < 0.05:
            eng.clear(None, "", True, 0.0)
        if random.random() < 0.4:
            listener.listen()

    there = set().union(*(table.slots for scope in eng._core.index.scopes for table in scope.tables.values()))
    assert listener.listen() == there
