# SPDX-License-Identifier: Apache-2.0
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.arenas_on_disk import KIB, MIB, machine, rows_of, slots_of, small_arena, small_config, store

from kvpool.arena.errors import ArenaError
from kvpool.arena.opening import open_arena
from kvpool.arena.shm import ShmArena
from kvpool.model.errors import Busy, LayoutRefused, PoolFull


@pytest.fixture
def arena(tmp_path: Path):
    with small_arena(tmp_path) as opened:
        yield opened


def reopened(path: Path) -> ShmArena:
    return small_arena(path)


def files(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "arena").iterdir())


def generation_of(arena: ShmArena, region: int) -> int:
    return int(arena.memories(np.array([region]))[0]) // arena.regions


def descriptors() -> list[str]:
    return sorted(p.name for p in Path("/proc/self/fd").iterdir())


def client_mapping(arena: ShmArena, region: int, *, writable: bool) -> mmap.mmap:
    fd = arena.descriptor(region, writable=writable)
    try:
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(fd)


def test_a_region_is_cut_into_slots_of_one_size(arena: ShmArena) -> None:
    assert arena.format(2, MIB, "t") == 4
    assert arena.format(1, 300 * KIB, "") == 13

    assert arena.offsets(np.append(slots_of(arena, 1, 12), slots_of(arena, 2, 0, 3))).tolist() == [
        12 * 300 * KIB,
        0,
        3 * MIB,
    ]
    assert len(arena.view(int(slots_of(arena, 1, 12)[0]))) == 300 * KIB
    with pytest.raises(IndexError, match="region 2 has no slot 4"):
        arena.view(int(slots_of(arena, 2, 4)[0]))


def test_views_are_the_memory_that_a_client_maps(arena: ShmArena) -> None:
    arena.format(0, MIB, "t")
    reader, writer = client_mapping(arena, 0, writable=False), client_mapping(arena, 0, writable=True)

    arena.view(int(slots_of(arena, 0, 1)[0]))[:5] = b"hello"
    assert reader[MIB : MIB + 5] == b"hello"
    writer[3 * MIB] = 9
    assert arena.view(int(slots_of(arena, 0, 3)[0]))[0] == 9
    reader.close()
    writer.close()


def test_a_read_only_descriptor_cannot_write(arena: ShmArena) -> None:
    arena.format(0, MIB, "t")
    fd = arena.descriptor(0, writable=False)

    with pytest.raises(PermissionError):
        mmap.mmap(fd, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)


@pytest.mark.parametrize("size", [0, -1, 4095, 4 * MIB + 1])
def test_slots_that_do_not_fit_are_refused_with_numbers(arena: ShmArena, size: int) -> None:
    with pytest.raises(LayoutRefused, match=rf"slot of {size} bytes.*4096 to {4 * MIB}.*l1\.segment_bytes"):
        arena.format(0, size, "t")


def test_a_tenant_with_an_endless_name_is_refused(arena: ShmArena) -> None:
    with pytest.raises(LayoutRefused, match="1025 bytes"):
        arena.format(0, MIB, "x" * 1025)


def test_what_was_committed_is_there_for_the_next_server(tmp_path: Path) -> None:
    with small_arena(tmp_path) as arena:
        assert arena.recovered == []
        arena.format(3, MIB, "team")
        arena.format(1, 64 * KIB, "")
        late = store(arena, slots_of(arena, 3, 2), 7)
        early = store(arena, slots_of(arena, 3, 0), 8)
        arena.begin(slots_of(arena, 3, 1), rows_of(9))
        store(arena, slots_of(arena, 1, 5, 6), 1, 2)
        arena.erase(slots_of(arena, 1, 5))
        arena.view(int(slots_of(arena, 3, 2)[0]))[:3] = b"abc"

    with reopened(tmp_path) as arena:
        one, three = arena.recovered
        assert (one.region, one.slot_bytes, one.owner) == (1, 64 * KIB, "")
        assert (three.region, three.slot_bytes, three.owner) == (3, MIB, "team")
        assert one.ready.tolist() == slots_of(arena, 1, 6).tolist()
        assert one.writing.tolist() == []
        assert three.ready.tolist() == slots_of(arena, 3, 2, 0).tolist(), "written first, first"
        assert np.array_equal(three.ready_rows, np.append(late, early))
        assert three.writing.tolist() == slots_of(arena, 3, 1).tolist()
        assert np.array_equal(three.writing_rows, rows_of(9))
        assert bytes(arena.view(int(slots_of(arena, 3, 2)[0]))[:3]) == b"abc"


def test_sequences_go_on_after_a_restart(tmp_path: Path) -> None:
    with small_arena(tmp_path) as arena:
        arena.format(0, MIB, "t")
        store(arena, slots_of(arena, 0, 3), 1)
    with reopened(tmp_path) as arena:
        store(arena, slots_of(arena, 0, 1), 2)
    with reopened(tmp_path) as arena:
        assert arena.recovered[0].ready.tolist() == [3, 1]


def test_commit_changes_what_is_known_only_then_and_nothing_else(arena: ShmArena) -> None:
    for region in (0, 2):
        arena.format(region, MIB, "t")
    slots = np.append(slots_of(arena, 2, 1), slots_of(arena, 0, 3))
    arena.begin(slots, rows_of(10, 20))
    arena.commit(
        slots, np.array([5, 6], np.uint64), np.array([b"x" * 16, b"y" * 16], "V16"), np.array([1, 2], np.uint8)
    )

    expected = rows_of(10, 20)
    expected["length"], expected["checksum_kind"] = [5, 6], [1, 2]
    expected["checksum"] = np.array([b"x" * 16, b"y" * 16], "V16")
    assert np.array_equal(arena.rows(slots), expected)
    assert np.array_equal(arena.rows(slots[::-1]), expected[::-1])


def test_no_slots_are_no_work(arena: ShmArena) -> None:
    none = np.empty(0, dtype=np.int64)
    arena.begin(none, rows_of())
    arena.commit(none, np.empty(0, np.uint64), np.empty(0, "V16"), np.empty(0, np.uint8))
    arena.erase(none)

    assert len(arena.rows(none)) == len(arena.offsets(none)) == 0


def test_formatting_again_erases_all_headers(tmp_path: Path) -> None:
    with small_arena(tmp_path) as arena:
        arena.format(0, 64 * KIB, "t")
        store(arena, slots_of(arena, 0, 0, 5, 63), 1, 2, 3)
        arena.format(0, MIB, "t")
        arena.format(0, 64 * KIB, "t")
    with reopened(tmp_path) as arena:
        assert arena.recovered[0].ready.tolist() == arena.recovered[0].writing.tolist() == []


@pytest.mark.behaviour("D107")
def test_a_new_owner_gets_memory_that_the_former_one_cannot_reach(arena: ShmArena) -> None:
    arena.format(0, MIB, "a")
    former = client_mapping(arena, 0, writable=True)
    former[:6] = b"secret"
    generation = generation_of(arena, 0)

    arena.format(0, MIB, "b")
    view = arena.view(int(slots_of(arena, 0, 0)[0]))
    assert bytes(view[:6]) == bytes(6)
    assert generation_of(arena, 0) == generation + 1
    former[:6] = b"poison"
    assert bytes(view[:6]) == bytes(6)
    assert arena.writers_gone(0), "the former client cannot write to the region any more"
    former.close()


def test_the_same_owner_keeps_memory_and_mappings(arena: ShmArena) -> None:
    arena.format(0, MIB, "a")
    client = client_mapping(arena, 0, writable=True)

    arena.format(0, 2 * MIB, "a")
    client[2 * MIB] = 7
    assert generation_of(arena, 0) == 0
    assert arena.view(int(slots_of(arena, 0, 1)[0]))[0] == 7
    assert not arena.writers_gone(0)
    client.close()


def test_an_emptied_region_is_not_handed_to_another_owner_after_a_restart(tmp_path: Path) -> None:
    with small_arena(tmp_path) as arena:
        arena.format(0, MIB, "a")
        former = client_mapping(arena, 0, writable=True)
        former[:6] = b"secret"
        arena._segments[0]._page.erase()  # what a crash in the middle of `format` leaves
    with reopened(tmp_path) as arena:
        assert arena.recovered == []
        arena.format(0, MIB, "b")
        assert bytes(arena.view(0)[:6]) == bytes(6)
        former[:6] = b"poison"
        assert bytes(arena.view(0)[:6]) == bytes(6)
    former.close()


def test_released_regions_are_empty_and_fresh(tmp_path: Path) -> None:
    with small_arena(tmp_path) as arena:
        arena.format(0, MIB, "a")
        store(arena, slots_of(arena, 0, 0), 1)
        arena.view(0)[:6] = b"secret"
        arena.release(0)
        arena.release(1)
        assert generation_of(arena, 1) == 0, "nobody ever saw its memory"
    with reopened(tmp_path) as arena:
        assert arena.recovered == []
        arena.format(0, MIB, "a")
        assert bytes(arena.view(0)[:6]) == bytes(6)


def test_a_client_that_locks_a_region_exclusively_gets_busy(arena: ShmArena) -> None:
    arena.format(0, MIB, "t")
    fd = arena.descriptor(0, writable=True)
    fcntl.flock(fd, fcntl.LOCK_EX)

    with pytest.raises(Busy, match="region 0"):
        arena.descriptor(0, writable=True)
    os.close(fd)


def test_scopes_are_remembered(tmp_path: Path) -> None:
    with small_arena(tmp_path) as arena:
        arena.remember_scope(b"s" * 32, "tenant", "model", b"namespace")
    with reopened(tmp_path) as arena:
        assert arena.remembered_scopes() == {b"s" * 32: ("tenant", "model", b"namespace")}


def test_two_servers_cannot_open_one_arena(tmp_path: Path) -> None:
    with small_arena(tmp_path), pytest.raises(ArenaError, match=f"in use by process {os.getpid()}"):
        small_arena(tmp_path)
    with small_arena(tmp_path), small_arena(tmp_path, "other"):
        pass


def test_close_is_idempotent_and_leaves_views_alive(tmp_path: Path) -> None:
    arena = small_arena(tmp_path)
    arena.format(0, MIB, "t")
    view = arena.view(0)
    before = len(descriptors())

    arena.close()
    arena.close()
    view[0] = 1
    assert view[0] == 1
    view.release()
    assert len(descriptors()) < before


def test_everything_is_released(tmp_path: Path) -> None:
    before = descriptors()
    with small_arena(tmp_path) as arena:
        arena.format(0, MIB, "t")
        arena.format(0, MIB, "u")
        arena.grow()
    with pytest.raises(ArenaError):
        open_arena(small_config(tmp_path), "pool", machine=machine(free_bytes=0))

    assert descriptors() == before
    reopened(tmp_path).close()


def test_without_persist_nothing_is_left(tmp_path: Path) -> None:
    with small_arena(tmp_path, persist=False) as arena:
        arena.format(0, MIB, "t")
        arena.remember_scope(b"s" * 32, "t", "m", b"n")
        assert "kvpool.pool.scopes" in files(tmp_path)

    assert files(tmp_path) == []


def test_files_and_folder_are_private(tmp_path: Path) -> None:
    with small_arena(tmp_path) as arena:
        arena.format(0, MIB, "t")
        arena.remember_scope(b"s" * 32, "t", "m", b"n")

    assert (tmp_path / "arena").stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "arena").iterdir()} == {0o600}


def test_a_folder_without_a_folder_above_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"l1\.directory: .*/no/arena cannot be opened.*No such file"):
        small_arena(tmp_path / "no")


def test_growing_reserves_everything_in_the_background(arena: ShmArena) -> None:
    assert arena.grown_bytes == 0

    arena.grow(threads=2)
    arena.grow(threads=2)
    assert arena.wait_grown(60)
    assert arena.grown_bytes == 16 * MIB
    assert arena.growth_failure == ""


def test_a_region_is_reserved_before_it_is_used(arena: ShmArena, tmp_path: Path) -> None:
    arena.format(1, MIB, "t")

    assert arena.grown_bytes == 4 * MIB
    assert (tmp_path / "arena" / "kvpool.pool.v1.1.data").stat().st_blocks * 512 >= 4 * MIB


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_file_system_is_an_error_and_the_region_stays_empty(
    arena: ShmArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(PoolFull, match=r"memory of region 1 .*No space"):
            arena.format(1, MIB, "t")

    assert arena.format(1, MIB, "t") == 4
    store(arena, slots_of(arena, 1, 0), 1)


def test_growing_into_a_full_file_system_ends_and_says_so(arena: ShmArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)

    arena.grow(threads=1)
    assert arena.wait_grown(60)
    assert "No space left" in arena.growth_failure
