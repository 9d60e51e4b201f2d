# SPDX-License-Identifier: Apache-2.0
"""L1 made larger and smaller while it is used: 4 regions of 16 pages at the start."""

from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, digests, engine
from tests.property.engine_checks import check

from kvpool.engine.engine import Engine
from kvpool.model.identity import Mode
from kvpool.model.slots import Disposition

REGION = 16 * PAGE


def filled(eng: Engine, arena: MemoryArena) -> FakeClient:
    """A client; another one has stored four chains of sixteen chunks, in the order of their numbers, and left."""
    client = FakeClient(eng, arena, Mode.CLIENT_MOVED).join()
    for chain in range(4):
        client.store(digests(*range(16), chain=chain))
    client.engine.unregister(client.client_id, 0.0)
    return FakeClient(eng, arena).join()


def settled(eng: Engine, now_s: float = 1.0) -> float:
    """Let time pass until the size is as wanted, or nothing more happens."""
    for _ in range(20):
        now_s += 1.0
        eng.tick(now_s)
    check(eng)
    return now_s


def sizes(eng: Engine) -> tuple[int, int, int]:
    """Regions that may hold chunks, that are wanted, that are retired and still mapped."""
    numbers = eng.numbers()
    return numbers.l1_bytes // REGION, numbers.l1_wanted_bytes // REGION, numbers.l1_mapped_bytes // REGION


def test_smaller_evicts_and_gives_memory_back(arena: MemoryArena) -> None:
    eng = engine(arena)
    client = filled(eng, arena)

    eng.room.resize(2, 1.0)
    settled(eng)

    assert sizes(eng) == (2, 2, 0)
    assert len(arena.idle) == 2
    assert eng.numbers().chunks == 32
    assert [client.found(digests(*range(16), chain=c)) for c in range(4)].count(16) >= 1
    assert client.store(digests(*range(40), chain=9)) == [Disposition.STORED] * 32 + [Disposition.FULL] * 8


def test_larger_is_there_at_once(arena: MemoryArena) -> None:
    arena.usable = 1
    eng = engine(arena)
    eng.recover(0.0)
    client = FakeClient(eng, arena).join()
    assert sizes(eng) == (1, 1, 0)
    assert client.store(digests(*range(40))).count(Disposition.STORED) == 16

    eng.room.resize(3, 1.0)

    assert sizes(eng) == (3, 3, 0)
    assert client.store(digests(*range(40))).count(Disposition.STORED) == 24
    assert client.found(digests(*range(40))) == 40
    eng.room.resize(99, 1.0)
    assert sizes(eng) == (4, 4, 0), "not more than there are"
    check(eng)


def test_what_is_pinned_stays_until_it_is_let_go(arena: MemoryArena) -> None:
    eng = engine(arena)
    client = filled(eng, arena)
    lookup_id, found = client.lookup(digests(*range(16), chain=2), now_s=1.0)
    assert found.chunks == 16

    eng.room.resize(1, 1.0)
    now_s = settled(eng)

    assert sizes(eng)[:2] == (sizes(eng)[0], 1)
    assert client.read(lookup_id, 0, 16, now_s=now_s), "a lookup keeps what it was promised"
    client.engine.free_lookup(client.client_id, lookup_id, 0, 16, now_s)
    settled(eng, now_s)
    assert sizes(eng) == (1, 1, 0)


def test_what_a_client_has_mapped_goes_once_it_ends(arena: MemoryArena) -> None:
    eng = engine(arena)
    client = FakeClient(eng, arena, Mode.CLIENT_MOVED).join()
    client.store(digests(*range(64)))
    for region in range(4):
        eng.region_access(client.client_id, region)

    eng.room.resize(1, 1.0)
    now_s = settled(eng)

    assert sizes(eng) == (1, 1, 3), "the room is gone, the memory is not"
    assert not arena.idle
    assert eng.unregister(client.client_id, now_s)
    settled(eng, now_s)
    assert sizes(eng) == (1, 1, 0)
    assert len(arena.idle) == 3


def test_growing_again_takes_back_what_was_on_its_way(arena: MemoryArena) -> None:
    eng = engine(arena)
    client = FakeClient(eng, arena, Mode.CLIENT_MOVED).join()
    client.store(digests(*range(64)))
    for region in range(4):
        eng.region_access(client.client_id, region)
    eng.room.resize(1, 1.0)
    now_s = settled(eng)

    eng.room.resize(4, now_s)

    assert sizes(eng) == (4, 4, 0)
    assert arena.generations == [0] * 4, "its memory never went"
    assert client.store(digests(*range(64), chain=1), now_s=now_s) == [Disposition.STORED] * 64
    settled(eng, now_s)


def test_watermarks_count_from_the_next_tick_on(arena: MemoryArena) -> None:
    eng = engine(arena)
    filled(eng, arena)
    settled(eng)
    assert eng.numbers().chunks == 64

    eng.room.set_watermarks(0.75, 0.5)
    settled(eng)

    assert eng.numbers().chunks == 32


def test_a_smaller_server_after_a_restart_keeps_what_fits(arena: MemoryArena) -> None:
    eng = engine(arena)
    filled(eng, arena)
    after = arena.reopen()
    after.usable = 2

    again = engine(after)
    assert again.recover(0.0).chunks == 64
    settled(again)

    assert sizes(again) == (2, 2, 0)
    assert again.numbers().chunks == 32
