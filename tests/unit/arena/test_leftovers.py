# SPDX-License-Identifier: Apache-2.0
import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.arenas_on_disk import MIB, machine, slots_of, small_arena, small_config, store

from kvpool.arena.errors import ArenaError
from kvpool.arena.files import Folder
from kvpool.arena.leftovers import MARGIN_S, Fate, Living, sweep_other_pools
from kvpool.arena.opening import open_arena

NOW = 1.9e9
LATER = 4e9
"""Seconds since 1970: a list that is younger than everything that a test makes."""
GONE = Living((), LATER)
"""No pool exists."""


def left_by(path: Path, pool: str = "pool", **changes: object) -> None:
    """A former server kept one chunk in region 0 and one in region 3."""
    with small_arena(path, pool, **changes) as arena:
        for region in (0, 3):
            arena.format(region, MIB, "t")
            store(arena, slots_of(arena, region, 1), region)


def files(path: Path, pool: str = "pool") -> list[str]:
    return sorted(p.name for p in (path / "arena").iterdir() if f".{pool}." in p.name and p.suffix != ".lock")


def test_regions_of_the_same_size_are_adopted_though_there_are_more_or_fewer(tmp_path: Path) -> None:
    left_by(tmp_path)
    with small_arena(tmp_path, size_bytes=24 * MIB, segment_bytes=4 * MIB) as larger:
        assert [r.region for r in larger.recovered] == [0, 3]
        assert larger.regions == 6
    with small_arena(tmp_path, size_bytes=16 * MIB, segment_bytes=6 * MIB) as other:
        assert other.recovered == []
        assert other.aside_bytes() == 0
    assert len(files(tmp_path)) == 2 * 2


def test_regions_beyond_the_size_are_removed(tmp_path: Path) -> None:
    left_by(tmp_path, size_bytes=24 * MIB, segment_bytes=4 * MIB)
    with small_arena(tmp_path) as arena:
        assert [r.region for r in arena.recovered] == [0, 3]
    assert len(files(tmp_path)) == 2 * 4


def test_what_a_client_still_holds_is_set_aside_and_counted_until_it_lets_go(tmp_path: Path) -> None:
    with small_arena(tmp_path) as arena:
        arena.format(0, MIB, "t")
        fd = arena.descriptor(0, writable=True)
    with small_arena(tmp_path, segment_bytes=8 * MIB) as arena:
        arena.format(0, MIB, "t")
        assert arena.recovered == []
        assert arena.aside_bytes() == 4 * MIB
    with small_arena(tmp_path, segment_bytes=8 * MIB) as arena:
        assert [r.region for r in arena.recovered] == [0]
        assert arena.aside_bytes() == 4 * MIB
        os.close(fd)
        assert arena.aside_bytes() == 0
    assert len(files(tmp_path)) == 2 * 2


def test_several_may_be_aside(tmp_path: Path) -> None:
    held = []
    for size in (4, 8, 16):
        with small_arena(tmp_path, segment_bytes=size * MIB) as arena:
            arena.format(0, MIB, "t")
            held.append(arena.descriptor(0, writable=True))
    with small_arena(tmp_path) as arena:
        assert arena.aside_bytes() == 28 * MIB
        for fd in held:
            os.close(fd)
        assert arena.aside_bytes() == 0


@pytest.mark.parametrize("damage", ["short data", "short head", "no data", "no head", "other page", "symlink"])
def test_a_half_made_or_damaged_region_is_made_anew(tmp_path: Path, damage: str) -> None:
    left_by(tmp_path)
    data, head = (tmp_path / "arena" / f"kvpool.pool.v1.0.{kind}" for kind in ("data", "head"))
    match damage:
        case "short data":
            os.truncate(data, 4096)
        case "short head":
            os.truncate(head, 100)
        case "no data":
            data.unlink()
        case "no head":
            head.unlink()
        case "other page":
            head.write_bytes((tmp_path / "arena" / "kvpool.pool.v1.3.head").read_bytes())
        case "symlink":
            head.rename(tmp_path / "elsewhere")
            head.symlink_to(tmp_path / "elsewhere")

    with small_arena(tmp_path) as arena:
        assert [r.region for r in arena.recovered] == [3]
        assert arena.format(0, MIB, "t") == 4


def test_a_header_file_cut_short_behind_its_page_makes_the_region_empty(tmp_path: Path) -> None:
    left_by(tmp_path)
    os.truncate(tmp_path / "arena" / "kvpool.pool.v1.0.head", 4096 + 100)

    with small_arena(tmp_path) as arena:
        assert [r.region for r in arena.recovered] == [3]
        assert arena.format(0, MIB, "t") == 4


def test_segments_of_another_version_are_removed(tmp_path: Path) -> None:
    left_by(tmp_path)
    for kind in ("data", "head"):
        path = tmp_path / "arena" / f"kvpool.pool.v1.0.{kind}"
        path.rename(path.with_name(f"kvpool.pool.v2.0.{kind}"))

    with small_arena(tmp_path) as arena:
        assert [r.region for r in arena.recovered] == [3]
    assert not [f for f in files(tmp_path) if ".v2." in f]


def test_temporary_files_go(tmp_path: Path) -> None:
    left_by(tmp_path)
    for name in ("kvpool.pool.v1.0.data.tmp", "kvpool.pool.scopes.tmp"):
        (tmp_path / "arena" / name).touch()

    small_arena(tmp_path).close()
    assert not [f for f in files(tmp_path) if f.endswith(".tmp")]


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    left_by(tmp_path)
    (tmp_path / "arena" / "mine.txt").write_text("mine")

    open_arena(small_config(tmp_path), "pool", living=Living((), LATER)).close()
    assert (tmp_path / "arena" / "mine.txt").read_text() == "mine"


def test_deleted_pools_are_swept_only_when_the_living_are_known(tmp_path: Path) -> None:
    for pool in ("living", "deleted"):
        left_by(tmp_path, pool)

    open_arena(small_config(tmp_path), "pool", living=None).close()
    assert files(tmp_path, "deleted")
    with open_arena(small_config(tmp_path), "pool", living=Living(("living",), LATER)) as arena:
        assert arena.swept_pools == ["deleted"]
    assert files(tmp_path, "living")
    assert not list((tmp_path / "arena").glob("*deleted*"))


def test_a_pool_whose_server_lives_or_whose_client_writes_is_not_swept(tmp_path: Path) -> None:
    left_by(tmp_path, "written")
    with small_arena(tmp_path, "written") as arena:
        fd = arena.descriptor(0, writable=True)
    with small_arena(tmp_path, "served"), open_arena(small_config(tmp_path), "pool", living=GONE) as arena:
        assert arena.swept_pools == []
    assert files(tmp_path, "written")
    os.close(fd)
    with open_arena(small_config(tmp_path), "pool", living=GONE) as arena:
        assert arena.swept_pools == ["served", "written"]


@pytest.mark.parametrize(("after_s", "swept"), [(0.0, False), (MARGIN_S - 60, False), (MARGIN_S + 60, True)])
def test_a_list_knows_nothing_of_pools_that_started_after_it_or_shortly_before(
    tmp_path: Path, after_s: float, swept: bool
) -> None:
    left_by(tmp_path, "unlisted")
    started_at = (tmp_path / "arena" / "kvpool.unlisted.lock").stat().st_mtime

    with open_arena(small_config(tmp_path), "pool", living=Living((), started_at + after_s)) as arena:
        assert arena.swept_pools == ["unlisted"] * swept
    assert bool(files(tmp_path, "unlisted")) is not swept


def test_looking_leaves_no_trace(tmp_path: Path) -> None:
    left_by(tmp_path, "deleted")
    lock = tmp_path / "arena" / "kvpool.deleted.lock"
    before = lock.stat().st_mtime_ns, lock.read_text(), files(tmp_path, "deleted")

    with Folder(tmp_path / "arena") as folder:
        assert sweep_other_pools(folder, GONE, remove=False) == {"deleted": Fate.REMOVED}
        assert sweep_other_pools(folder, None) == {}

    assert (lock.stat().st_mtime_ns, lock.read_text(), files(tmp_path, "deleted")) == before


names = st.sampled_from(["p0", "p1", "p2", "p3"])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(names), st.sets(names), st.sets(names), st.sets(names))
def test_nothing_living_is_ever_removed(
    tmp_path: Path, listed: set[str], served: set[str], written: set[str], young: set[str]
) -> None:
    """Whatever the list says: a pool that is on it, is served, written to, or young keeps every file."""
    place = Path(tempfile.mkdtemp(dir=tmp_path))
    everyone = {"p0", "p1", "p2", "p3"}
    with contextlib.ExitStack() as held:
        for pool in sorted(everyone):
            left_by(place, pool)
            lock = place / "arena" / f"kvpool.{pool}.lock"
            if pool in written:
                with small_arena(place, pool) as arena:
                    held.callback(os.close, arena.descriptor(0, writable=True))
            if pool in served:
                held.enter_context(small_arena(place, pool))
            for file in (place / "arena").glob(f"kvpool.{pool}.*"):
                os.utime(file, (0, NOW if pool in young else NOW - 2 * MARGIN_S))
            assert lock.exists()
        before = {pool: files(place, pool) for pool in everyone}
        with Folder(place / "arena") as folder:
            fates = sweep_other_pools(folder, Living(listed, NOW))

        removed = everyone - listed - served - written - young
        assert {pool for pool, fate in fates.items() if fate is Fate.REMOVED} == removed
        assert {pool: files(place, pool) for pool in everyone} == {
            pool: [] if pool in removed else kept for pool, kept in before.items()
        }


def test_a_refusal_leaves_what_could_be_adopted(tmp_path: Path) -> None:
    left_by(tmp_path)

    with pytest.raises(ArenaError, match=r"l1\.size_bytes"):
        open_arena(small_config(tmp_path), "pool", machine=machine(free_bytes=0))
    with small_arena(tmp_path) as arena:
        assert [r.region for r in arena.recovered] == [0, 3]
