# SPDX-License-Identifier: Apache-2.0
"""Rings and what their movers were granted, with movers that follow a script."""

from collections.abc import Iterator

import pytest
from tests.fakes.ring_clients import RingClient, RingWorld, to_write
from tests.fakes.scripted_movers import ScriptedMover

from kvpool.index.phases import Phase
from kvpool.model.errors import Busy, UnknownLease
from kvpool.model.slots import Disposition
from kvpool.server.calls import Answer
from kvpool.wire.messages import RingState


@pytest.fixture
def world() -> Iterator[RingWorld]:
    made = RingWorld()
    yield made
    made.close()


@pytest.fixture
def anne(world: RingWorld) -> RingClient:
    return RingClient(world)


def dispositions(answer: Answer) -> list[int]:
    return list(answer.frames[0])


def test_nothing_is_granted_before_the_client_joined(world: RingWorld, anne: RingClient) -> None:
    world.turn()
    (mover,) = world.movers.living.values()
    world.movers.say_ready(mover)
    world.turn()

    _, grant, rows = anne.prepare(0, 1)

    assert grant == b""
    assert len(to_write(rows)) == 2, "they are streamed"
    anne.watch(joined=True)
    assert anne.prepare(2, 3)[1]


def test_a_commit_waits_for_the_movers_word(world: RingWorld, anne: RingClient) -> None:
    mover = anne.join()
    store_id, grant, rows = anne.prepare(0, 1)

    call, answer = anne.commit(store_id, [1, 1])
    assert answer is None
    assert anne.lookup(0, 1)[1] == 0
    world.movers.say_revoked(mover, grant)
    world.turn()

    assert dispositions(world.answers.ended[call]) == [Disposition.STORED] * 2
    assert anne.lookup(0, 1)[1] == 2
    assert (world.slots.phase[to_write(rows)] == Phase.READY).all()


def test_a_commit_that_comes_too_late_waits_for_the_movers_word_all_the_same(
    world: RingWorld, anne: RingClient
) -> None:
    """The store ran out and its grant was revoked by that; until the mover says so, it may still write."""
    mover = anne.join()
    store_id, grant, rows = anne.prepare(0, 1)
    world.turn(100.0)
    assert (world.slots.phase[to_write(rows)] == Phase.LAPSED).all()

    call, answer = anne.commit(store_id, [1, 1])

    assert answer is None
    assert (world.slots.phase[to_write(rows)] == Phase.LAPSED).all(), "nobody else may get what a mover may write to"
    world.movers.say_revoked(mover, grant)
    world.turn()
    assert dispositions(world.answers.ended[call]) == [Disposition.ABANDONED] * 2
    assert (world.slots.phase[to_write(rows)] == Phase.FREE).all()


def test_a_second_commit_does_not_go_before_the_movers_word(world: RingWorld, anne: RingClient) -> None:
    mover = anne.join()
    store_id, grant, _ = anne.prepare(0, 1)
    first, _ = anne.commit(store_id, [1, 1])

    second, answer = anne.commit(store_id, [1, 1])

    assert answer is None
    assert anne.lookup(0, 1)[1] == 0
    world.movers.say_revoked(mover, grant)
    world.turn()
    assert dispositions(world.answers.ended[first]) == [Disposition.STORED] * 2
    assert isinstance(world.answers.ended[second], UnknownLease)
    assert anne.lookup(0, 1)[1] == 2


@pytest.mark.behaviour("D002")
def test_chunks_that_the_mover_did_not_move_are_not_kept(world: RingWorld, anne: RingClient) -> None:
    mover = anne.join()
    store_id, grant, _ = anne.prepare(0, 1)
    call, _ = anne.commit(store_id, [1, 1])

    world.movers.say_revoked(mover, grant, moved_chunks=1)
    world.turn()

    assert dispositions(world.answers.ended[call]) == [Disposition.ABANDONED] * 2
    assert anne.lookup(0, 1)[1] == 0


def test_a_commit_after_the_movers_word_is_answered_at_once(world: RingWorld, anne: RingClient) -> None:
    """The mover has moved all of it and says so by itself; nothing is readable before the commit all the same."""
    mover = anne.join()
    store_id, grant, _ = anne.prepare(0, 1)
    world.movers.say_revoked(mover, grant)
    world.turn()
    assert anne.lookup(0, 1)[1] == 0

    call, answer = anne.commit(store_id, [1, 0])

    assert answer is None
    assert dispositions(world.answers.ended[call]) == [Disposition.STORED, Disposition.ABANDONED]
    assert call not in world.answers.open
    with pytest.raises(UnknownLease):
        anne.commit(store_id, [1, 1])
    assert anne.lookup(0, 1)[1] == 1


def test_what_a_mover_said_by_itself_counts_as_much(world: RingWorld, anne: RingClient) -> None:
    mover = anne.join()
    store_id, grant, _ = anne.prepare(0, 1)
    world.movers.say_revoked(mover, grant, moved_chunks=1)
    world.turn()

    call, _ = anne.commit(store_id, [1, 1])

    assert dispositions(world.answers.ended[call]) == [Disposition.ABANDONED] * 2
    assert anne.lookup(0, 1)[1] == 0


def test_a_commit_may_come_while_the_mover_is_at_it(world: RingWorld, anne: RingClient) -> None:
    mover = anne.join()
    store_id, grant, _ = anne.prepare(0, 1)

    call, answer = anne.commit(store_id, [1, 1], moving=True)

    assert answer is None
    world.turn()
    assert not mover.grants[grant].asked, "nobody stops the mover"
    assert anne.lookup(0, 1)[1] == 0
    world.movers.say_revoked(mover, grant)
    world.turn()
    assert dispositions(world.answers.ended[call]) == [Disposition.STORED] * 2
    assert anne.lookup(0, 1)[1] == 2
    with pytest.raises(UnknownLease):
        anne.commit(store_id, [1, 1])


def test_the_movers_word_may_come_before_such_a_commit(world: RingWorld, anne: RingClient) -> None:
    mover = anne.join()
    store_id, grant, _ = anne.prepare(0, 1)
    world.movers.say_revoked(mover, grant)
    world.turn()

    call, _ = anne.commit(store_id, [1, 1], moving=True)

    assert dispositions(world.answers.ended[call]) == [Disposition.STORED] * 2


def test_a_commit_that_knows_the_end_takes_the_place_of_one_that_did_not(world: RingWorld, anne: RingClient) -> None:
    mover = anne.join()
    store_id, grant, _ = anne.prepare(0, 1)
    early, _ = anne.commit(store_id, [1, 1], moving=True)

    late, answer = anne.commit(store_id, [1, 0])

    assert isinstance(world.answers.ended[early], UnknownLease)
    assert answer is None
    assert mover.grants[grant].asked
    world.movers.say_revoked(mover, grant, moved_chunks=1)
    world.turn()
    assert dispositions(world.answers.ended[late]) == [Disposition.STORED, Disposition.ABANDONED]
    assert anne.lookup(0, 1)[1] == 1


@pytest.mark.parametrize("lapsed", [False, True])
def test_such_a_commit_is_refused_if_the_mover_dies(world: RingWorld, anne: RingClient, *, lapsed: bool) -> None:
    mover = anne.join()
    store_id, _, rows = anne.prepare(0, 1)
    call, _ = anne.commit(store_id, [1, 1], moving=True)
    if lapsed:
        world.turn(100.0)
        assert isinstance(world.answers.ended[call], UnknownLease), "the lease ran out"

    world.movers.end(mover.mover_id, "it died")
    world.movers.reap(mover)
    world.turn()

    assert isinstance(world.answers.ended[call], UnknownLease)
    world.turn(100.0)
    assert (world.slots.phase[to_write(rows)] == Phase.FREE).all()
    assert anne.lookup(0, 1)[1] == 0


def test_such_a_commit_needs_a_mover_that_is_at_it(world: RingWorld, anne: RingClient) -> None:
    anne.join()
    store_id, _, _ = anne.prepare(0, 1)
    anne.commit(store_id, [1, 1], moving=True)
    with pytest.raises(UnknownLease):
        anne.commit(store_id, [1, 1], moving=True)
    anne.commit(store_id, [1, 0])
    with pytest.raises(UnknownLease):
        anne.commit(store_id, [1, 1], moving=True)
    with pytest.raises(UnknownLease):
        anne.commit(bytes(16), [1], moving=True)


@pytest.fixture
def found(world: RingWorld, anne: RingClient) -> tuple[bytes, bytes, ScriptedMover]:
    """A load of two chunks that was granted: the lookup, the grant, the mover."""
    mover = anne.join()
    store_id, grant, _ = anne.prepare(0, 1)
    anne.commit(store_id, [1, 1])
    world.movers.say_revoked(mover, grant)
    world.turn()
    lookup_id, chunks = anne.lookup(0, 1)
    return lookup_id, anne.load(lookup_id, chunks)[0], mover


Found = tuple[bytes, bytes, ScriptedMover]


@pytest.mark.parametrize("early", [False, True])
def test_a_load_is_vouched_for_once_its_mover_has_read_all(
    world: RingWorld, anne: RingClient, found: Found, *, early: bool
) -> None:
    lookup_id, grant, mover = found
    call = anne.loading(lookup_id, 2) if early else None
    world.turn()
    assert not mover.grants[grant].asked
    assert not call or call in world.answers.open
    world.movers.say_revoked(mover, grant)
    world.turn()

    call = call or anne.loading(lookup_id, 2)

    assert dispositions(world.answers.ended[call]) == [Disposition.VOUCHED] * 2
    assert not world.slots.pins.any()


def test_a_load_that_did_not_get_all_is_committed_again(world: RingWorld, anne: RingClient, found: Found) -> None:
    lookup_id, grant, mover = found
    call = anne.loading(lookup_id, 2)

    assert anne.loaded(lookup_id, 2) == [Disposition.VOUCHED] * 2

    assert isinstance(world.answers.ended[call], UnknownLease)
    assert world.slots.pins.any(), "the mover may still read"
    world.movers.say_revoked(mover, grant)
    world.turn()
    assert not world.slots.pins.any()


def test_what_a_mover_said_of_a_load_is_not_kept_for_ever(world: RingWorld, anne: RingClient, found: Found) -> None:
    lookup_id, grant, mover = found
    world.movers.say_revoked(mover, grant)
    world.turn()
    assert anne.loaded(lookup_id, 2) == [Disposition.VOUCHED] * 2
    other, _ = anne.lookup(0, 1)
    again, _ = anne.load(other, 2)
    world.movers.say_revoked(mover, again)
    world.turn()

    world.turn(100.0)

    assert not world.rings._granted._told


def test_a_load_whose_lease_ran_out_is_not_vouched_for(world: RingWorld, anne: RingClient, found: Found) -> None:
    lookup_id, _, mover = found
    call = anne.loading(lookup_id, 2)

    world.turn(100.0)

    assert isinstance(world.answers.ended[call], UnknownLease)
    world.movers.end(mover.mover_id, "it died")
    world.movers.reap(mover)
    world.turn()
    assert not world.slots.pins.any()


@pytest.mark.parametrize("lost", [False, True])
def test_slots_of_a_store_without_a_commit_are_free_after_the_movers_word(
    world: RingWorld, anne: RingClient, *, lost: bool
) -> None:
    mover = anne.join()
    store_id, grant, rows = anne.prepare(0, 1)
    world.movers.say_revoked(mover, grant)
    world.turn()
    assert (world.slots.phase[to_write(rows)] == Phase.WRITING).all()

    if lost:
        anne.lose(proven_dead=True)
    world.turn(100.0)

    assert (world.slots.phase[to_write(rows)] == Phase.FREE).all()
    if not lost:
        with pytest.raises(UnknownLease):
            anne.commit(store_id, [1, 1])


@pytest.mark.behaviour("D014")
def test_slots_of_a_client_that_died_stay_held_until_its_mover_is_reaped(world: RingWorld, anne: RingClient) -> None:
    mover = anne.join()
    _, _, rows = anne.prepare(0, 1, 2)

    anne.lose(proven_dead=True)
    world.turn(100.0)
    assert (world.slots.phase[to_write(rows)] == Phase.LAPSED).all()

    world.movers.reap(mover)
    world.turn()
    world.turn()

    assert (world.slots.phase[to_write(rows)] == Phase.FREE).all()


def test_a_load_holds_its_chunks_after_its_lease_ran_out(world: RingWorld, anne: RingClient) -> None:
    mover = anne.join()
    store_id, grant, rows = anne.prepare(0)
    anne.commit(store_id, [1])
    world.movers.say_revoked(mover, grant)
    world.turn()
    lookup_id, found = anne.lookup(0)
    load, _ = anne.load(lookup_id, found)

    world.turn(100.0)
    assert mover.grants[load].asked, "it was told to end"
    assert world.slots.pins[to_write(rows)].tolist() == [1], "until it says that it did"
    world.movers.say_revoked(mover, load)
    world.turn()

    assert not world.slots.pins.any()


def test_the_next_mover_starts_when_the_former_one_is_reaped(world: RingWorld, anne: RingClient) -> None:
    first = anne.join()

    anne.register_ring()
    world.turn()
    assert not world.movers.living
    assert anne.watch()[1].state is RingState.STARTING
    world.movers.reap(first)
    world.turn()

    (second,) = world.movers.living.values()
    assert second.mover_id != first.mover_id


def test_who_waits_for_news_is_told_of_a_mover_that_died(world: RingWorld, anne: RingClient) -> None:
    mover = anne.join()
    call, news = anne.watch(joined=True, wait_s=20.0)
    assert news is None

    world.movers.die(mover, "an illegal address")
    world.turn()
    assert world.answers.ended[call].reply.state is RingState.ENDING
    world.movers.reap(mover)
    world.turn()

    news = anne.watch()[1]
    assert (news.state, news.reason) == (RingState.OVER, "an illegal address")
    assert anne.prepare(0)[1] == b""


def test_a_mover_that_cannot_be_started_is_told_with_its_reason(world: RingWorld, anne: RingClient) -> None:
    world.movers.refuse_start = OSError("out of processes")

    world.turn()

    news = anne.watch()[1]
    assert news.state is RingState.OVER
    assert "out of processes" in news.reason


def test_memory_that_cannot_be_handed_out_ends_the_ring_and_the_store_is_asked_again(
    world: RingWorld, anne: RingClient
) -> None:
    anne.join()
    world.movers.refuse_memory = OSError("out of descriptors")

    with pytest.raises(Busy, match="out of descriptors"):
        anne.prepare(0)

    assert anne.watch()[1].state is RingState.ENDING
    assert anne.prepare(1)[1] == b""


@pytest.mark.behaviour("D117")
def test_a_mover_has_its_memory_before_anything_is_granted(world: RingWorld, anne: RingClient) -> None:
    """It registers it with the device then, and not under the first copies."""
    mover = anne.join()

    assert mover.given == world.engine.movers.memories() != set()
    before = set(mover.given)
    anne.prepare(0, 1, 2)

    assert mover.given == before


def test_a_mover_that_ends_is_looked_at_again_soon_until_it_is_reaped(world: RingWorld, anne: RingClient) -> None:
    anne.join()
    anne.lose(proven_dead=True)
    world.turn()
    now_s = world.now_s

    assert not world.rings.due((), now_s)
    assert world.rings.due((), now_s + 0.1)
