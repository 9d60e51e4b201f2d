# SPDX-License-Identifier: Apache-2.0
"""What the engine may rely on, whichever arena it has."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.contract.arenas import ARENAS, Factory
from tests.fakes.arenas_on_disk import BODY_FIELDS, KIB, MIB, rows_of

from kvpool.engine.ports import Arena
from kvpool.model.slots import SERVER_OWNED, RecoveredRegion


@pytest.fixture(params=ARENAS.values(), ids=ARENAS)
def factory(request: pytest.FixtureRequest) -> Factory:
    made: Factory = request.param
    return made


@pytest.fixture
def arena(factory: Factory, tmp_path: Path) -> Iterator[Arena]:
    with factory(tmp_path) as opened:
        yield opened


def slots(arena: Arena, region: int, *positions: int) -> NDArray[np.int64]:
    return np.array(positions, dtype=np.int64) + region * arena.stride


def complete(arena: Arena, some: NDArray[np.int64], *numbers: int) -> NDArray[np.void]:
    rows = rows_of(*numbers)
    arena.begin(some, rows)
    arena.commit(some, rows["length"], rows["checksum"], rows["checksum_kind"])
    return rows


def found(arena: Arena, region: int) -> RecoveredRegion:
    return next(r for r in arena.recovered if r.region == region)


def by_slot(some: NDArray[np.int64], rows: NDArray[np.void]) -> dict[int, bytes]:
    return {slot: row.tobytes() for slot, row in zip(some.tolist(), rows, strict=True)}


def test_a_new_arena_has_nothing(arena: Arena) -> None:
    assert list(arena.recovered) == []
    assert arena.remembered_scopes() == {}
    assert arena.regions >= 3
    assert arena.region_bytes >= 4 * MIB


@pytest.mark.behaviour("D107")
def test_replaced_memory_gets_a_number_never_used_before(arena: Arena) -> None:
    regions = np.arange(arena.regions)
    seen = [int(arena.memories(regions)[1])]
    for owner in ("a", "b", "b", "a"):
        arena.format(1, MIB, owner)
        seen.append(int(arena.memories(regions)[1]))

    assert seen[2] == seen[3]
    assert len({*seen[1:], *arena.memories(regions[[0, 2]]).tolist()}) == 3 + 2


def test_part_of_a_slot_is_read_as_it_was_written(arena: Arena) -> None:
    arena.format(2, 64 * KIB, "t")
    (slot,) = slots(arena, 2, 3).tolist()
    arena.view(slot)[10:16] = b"inside"

    assert arena.read(slot, 9, 8) == b"\0inside\0"


@pytest.mark.parametrize("slot_bytes", [4 * KIB, 64 * KIB, 96 * KIB, MIB, 4 * MIB])
def test_a_region_holds_as_many_slots_as_fit(arena: Arena, slot_bytes: int) -> None:
    count = arena.format(1, slot_bytes, "t")

    assert count == arena.region_bytes // slot_bytes <= arena.stride
    everything = slots(arena, 1, *range(count))
    assert arena.offsets(everything).tolist() == [i * slot_bytes for i in range(count)]


def test_slots_are_apart_writable_and_of_their_size(arena: Arena) -> None:
    arena.format(0, MIB, "t")
    arena.format(2, 64 * KIB, SERVER_OWNED)
    some = np.append(slots(arena, 0, 0, 1, 3), slots(arena, 2, 0, 1, 63))
    for n, slot in enumerate(some.tolist()):
        view = arena.view(slot)
        assert len(view) == (MIB if n < 3 else 64 * KIB)
        assert not view.readonly
        view[:] = bytes([n + 1]) * len(view)

    for n, slot in enumerate(some.tolist()):
        assert bytes(arena.view(slot)) == bytes([n + 1]) * len(arena.view(slot))


def test_headers_keep_what_begin_and_commit_say(arena: Arena) -> None:
    for region in (0, 2):
        arena.format(region, MIB, "t")
    some = np.append(slots(arena, 2, 3, 1), slots(arena, 0, 2))
    arena.begin(some, rows_of(1, 2, 3))
    begun = arena.rows(some)
    for name in BODY_FIELDS:
        assert np.array_equal(begun[name], rows_of(1, 2, 3)[name])

    checksums = np.array([bytes([n]) * 16 for n in (7, 8, 9)], dtype="V16")
    arena.commit(some, np.array([10, 20, 30], np.uint64), checksums, np.array([1, 2, 1], np.uint8))
    rows = arena.rows(some)
    assert rows["length"].tolist() == [10, 20, 30]
    assert rows["checksum"].tolist() == checksums.tolist()
    assert rows["checksum_kind"].tolist() == [1, 2, 1]
    for name in BODY_FIELDS:
        assert np.array_equal(rows[name], rows_of(1, 2, 3)[name])


def test_rows_are_a_copy(arena: Arena) -> None:
    arena.format(0, MIB, "t")
    rows = complete(arena, slots(arena, 0, 1), 5)

    arena.rows(slots(arena, 0, 1))["length"] = 0
    assert np.array_equal(arena.rows(slots(arena, 0, 1)), rows)


def test_the_next_arena_finds_ready_and_unfinished_slots(factory: Factory, tmp_path: Path) -> None:
    with factory(tmp_path) as arena:
        arena.format(0, MIB, "tenant")
        ready = complete(arena, slots(arena, 0, 2, 0), 1, 2)
        arena.begin(slots(arena, 0, 1), rows_of(3))
        complete(arena, slots(arena, 0, 3), 4)
        arena.erase(slots(arena, 0, 3))
        arena.view(int(slots(arena, 0, 2)[0]))[:4] = b"kept"
    with factory(tmp_path) as arena:
        region = found(arena, 0)
        assert (region.slot_bytes, region.owner) == (MIB, "tenant")
        assert by_slot(region.ready, region.ready_rows) == by_slot(slots(arena, 0, 2, 0), ready)
        assert region.writing.tolist() == slots(arena, 0, 1).tolist()
        assert region.writing_rows["digest"].tolist() == rows_of(3)["digest"].tolist()
        assert bytes(arena.view(int(slots(arena, 0, 2)[0]))[:4]) == b"kept"


def test_a_begun_slot_is_not_ready_though_it_was_before(factory: Factory, tmp_path: Path) -> None:
    with factory(tmp_path) as arena:
        arena.format(0, MIB, "t")
        complete(arena, slots(arena, 0, 0), 1)
        arena.begin(slots(arena, 0, 0), rows_of(2))
    with factory(tmp_path) as arena:
        assert found(arena, 0).ready.tolist() == []
        assert found(arena, 0).writing.tolist() == slots(arena, 0, 0).tolist()


def test_format_forgets_every_header(factory: Factory, tmp_path: Path) -> None:
    with factory(tmp_path) as arena:
        arena.format(0, MIB, "a")
        complete(arena, slots(arena, 0, 0, 3), 1, 2)
        arena.format(0, 64 * KIB, "b")
    with factory(tmp_path) as arena:
        region = found(arena, 0)
        assert (region.slot_bytes, region.owner) == (64 * KIB, "b")
        assert region.ready.tolist() == region.writing.tolist() == []


def test_without_clients_no_writer_is_left(arena: Arena) -> None:
    arena.format(0, MIB, "t")

    assert arena.writers_gone(0)
    assert arena.writers_gone(1)


def test_scopes_come_back(factory: Factory, tmp_path: Path) -> None:
    with factory(tmp_path) as arena:
        arena.remember_scope(b"a" * 32, "t", "m", b"n")
        arena.remember_scope(b"b" * 32, "t", "m2", b"n2")
        arena.remember_scope(b"a" * 32, "t", "m", b"n")
    with factory(tmp_path) as arena:
        assert arena.remembered_scopes() == {b"a" * 32: ("t", "m", b"n"), b"b" * 32: ("t", "m2", b"n2")}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "commit", "erase"]), st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True)
    ),
    max_size=12,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_any_order_of_calls_is_what_the_next_arena_finds(
    factory: Factory, operations: list[tuple[str, list[int]]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        check_next_arena(factory, Path(name), operations)


def check_next_arena(factory: Factory, folder: Path, operations: list[tuple[str, list[int]]]) -> None:
    ready: dict[int, bytes] = {}
    writing: dict[int, bytes] = {}
    with factory(folder) as arena:
        places = np.append(slots(arena, 0, 0, 1, 2, 3), slots(arena, 2, 0, 1, 2, 3))
        for region in (0, 2):
            arena.format(region, MIB, "t")
        for number, (operation, picked) in enumerate(operations):
            some = places[[p for p in picked if operation != "commit" or int(places[p]) in writing]]
            rows = rows_of(*range(number * 8, number * 8 + len(some)))
            for slot in some.tolist():
                ready.pop(slot, None)
                writing.pop(slot, None)
            match operation:
                case "begin":
                    arena.begin(some, rows)
                    writing |= by_slot(some, rows)
                case "commit":
                    arena.commit(some, rows["length"], rows["checksum"], rows["checksum_kind"])
                    ready |= by_slot(some, arena.rows(some))
                case "erase":
                    arena.erase(some)
    with factory(folder) as arena:
        assert {s for r in arena.recovered for s in r.writing.tolist()} == set(writing)
        assert {k: v for r in arena.recovered for k, v in by_slot(r.ready, r.ready_rows).items()} == ready


def test_a_retired_region_gives_its_memory_back_and_comes_back_empty(arena: Arena, factory: Factory) -> None:
    arena.format(0, MIB, "a")
    arena.format(1, MIB, "a")
    complete(arena, slots(arena, 1, 0), 5)
    arena.view(0)[:6] = b"secret"
    before = arena.memories(np.array([0, 1]))

    arena.retire(0)
    arena.retire(2)

    assert list(arena.memories(np.array([0, 1])) == before) == [False, True], "no mapping reaches what comes after"
    arena.restore(0)
    arena.restore(2)
    assert arena.format(0, MIB, "a") == arena.region_bytes // MIB
    assert bytes(arena.view(0)[:6]) == bytes(6)
    assert arena.format(2, MIB, "b") == arena.region_bytes // MIB


def test_what_was_retired_is_not_recovered(factory: Factory, tmp_path: Path) -> None:
    with factory(tmp_path) as arena:
        for region in (0, 1):
            arena.format(region, MIB, "a")
            complete(arena, slots(arena, region, 0), region)
        arena.erase(slots(arena, 0, 0))
        arena.retire(0)
    with factory(tmp_path) as again:
        assert [r.region for r in again.recovered] == [1]
