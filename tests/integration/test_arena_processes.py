# SPDX-License-Identifier: Apache-2.0
"""The arena against real processes, real signals and a real tmpfs."""

import contextlib
import mmap
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.arenas_on_disk import BODY_FIELDS, KIB, MIB, rows_of, slots_of, small_arena
from tests.fakes.clients import until

from kvpool.arena.errors import ArenaError
from kvpool.arena.opening import open_arena
from kvpool.config import L1Config
from kvpool.model.slots import HEADER_ROW

SHM = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on a tmpfs, where the machine has one."""
    if not os.access(SHM, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=SHM, prefix="kvpool-test-") as name:
        yield Path(name)


@contextlib.contextmanager
def child(work: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """Run *work* in a forked process; yields its pid and the pipe that *work* reports through. Killed at the end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(reader)
            work(writer)
        os._exit(1)
    os.close(writer)
    try:
        yield pid, reader
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)


def write_for_ever(folder: Path, report: int, first: int) -> None:
    """Serve: begin, commit and erase in all regions, each time with rows that tell another number."""
    arena = small_arena(folder)
    for region in range(arena.regions):
        if region not in {r.region for r in arena.recovered}:
            arena.format(region, 64 * KIB, "t")
    slots = np.concatenate([slots_of(arena, r, *range(64)) for r in range(arena.regions)])
    random = np.random.default_rng(first)
    number = first
    while True:
        some = random.permutation(slots)[:100]
        rows = rows_of(*range(number, number + 100))
        arena.begin(some, rows)
        arena.commit(some, rows["length"], rows["checksum"], rows["checksum_kind"])
        arena.erase(some[:20])
        number += 100
        os.write(report, b".")


def check_rows(rows: np.ndarray, *, complete: bool) -> None:
    for row in rows:
        fields = (HEADER_ROW.names or ()) if complete else BODY_FIELDS
        told = {byte for name in fields for byte in np.atleast_1d(row[name]).tobytes()}
        assert len(told) == 1, "a row that mixes two"
        assert told != {0}, "a header that does not check"


@pytest.mark.behaviour("D106")
def test_a_server_killed_at_any_instant_leaves_no_mixed_header(folder: Path) -> None:
    """Twenty servers, each adopts what the one before left and is killed in the middle of its stores."""
    ready = 0
    for round_number in range(20):
        with child(lambda report, n=round_number: write_for_ever(folder, report, n * 37)) as (pid, reports):
            for _ in range(3 + round_number % 5):
                assert os.read(reports, 1) == b"."
            os.kill(pid, signal.SIGKILL)
        with small_arena(folder) as arena:
            assert len(arena.recovered) == arena.regions
            for region in arena.recovered:
                check_rows(region.ready_rows, complete=True)
                check_rows(region.writing_rows, complete=False)
                ready += len(region.ready)
    assert ready > 1000


def test_a_killed_server_does_not_keep_its_lock(folder: Path) -> None:
    with child(lambda report: write_for_ever(folder, report, 1)) as (pid, reports):
        assert os.read(reports, 1) == b"."
        with pytest.raises(ArenaError, match=f"in use by process {pid}"):
            small_arena(folder)
    small_arena(folder).close()


def test_killed_servers_leave_no_other_files_behind(folder: Path) -> None:
    for _ in range(3):
        with child(lambda report: write_for_ever(folder, report, 1)) as (_, reports):
            assert os.read(reports, 1) == b"."
    small_arena(folder, persist=False).close()

    assert list((folder / "arena").iterdir()) == []


@pytest.mark.parametrize("keep_descriptor", [True, False])
def test_a_writer_is_held_to_live_until_its_process_does_not(folder: Path, keep_descriptor: bool) -> None:
    """The lock hangs on the open file, which a mapping holds, too: without any descriptor, and over a restart."""
    with small_arena(folder) as arena:
        arena.format(0, MIB, "t")
        fd = arena.descriptor(0, writable=True)

    def client(report: int) -> None:
        mapping = mapped_without_descriptor(fd)
        if not keep_descriptor:
            os.close(fd)
        os.write(report, b".")
        signal.pause()
        os.write(report, bytes(mapping))

    with child(client) as (pid, reports):
        os.close(fd)
        assert os.read(reports, 1) == b"."
        with small_arena(folder) as arena:
            assert not arena.writers_gone(0)
            assert arena.writers_gone(1)
            os.kill(pid, signal.SIGKILL)
            assert os.read(reports, 1) == b"", "the process is gone"
            # Its pipe and its mapping go one after the other.
            until(lambda: arena.writers_gone(0))


def mapped_without_descriptor(fd: int) -> int:
    """Map through the C library: Python's own mmap keeps a copy of the descriptor, which would hide what is tested."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address = libc.mmap(None, MIB, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    return int(address)


def test_a_reader_process_proves_nothing_about_writers(folder: Path) -> None:
    with small_arena(folder) as arena:
        arena.format(0, MIB, "t")
        fd = arena.descriptor(0, writable=False)

        def client(report: int) -> None:
            os.write(report, b".")
            signal.pause()

        with child(client) as (_, reports):
            os.close(fd)
            assert os.read(reports, 1) == b"."
            assert arena.writers_gone(0)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 32 MiB; needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m,mode=0700", "none", str(tmp_path)], check=False, capture_output=True
    )
    if mount.returncode:
        pytest.skip(f"cannot mount here: {mount.stderr.decode()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_real_tmpfs_that_is_too_small_is_refused_with_its_size(small_tmpfs: Path) -> None:
    config = L1Config(size_bytes=64 * MIB, directory=str(small_tmpfs))

    with pytest.raises(
        ArenaError, match=rf"l1\.size_bytes: {64 * MIB} bytes need .* is {32 * MIB - 4096} bytes; lower"
    ):  # one page is the lock
        open_arena(config, "pool")


def test_a_real_tmpfs_that_fills_up_is_an_error_and_no_signal(small_tmpfs: Path) -> None:
    from kvpool.model.errors import PoolFull

    config = L1Config(size_bytes=16 * MIB, directory=str(small_tmpfs))
    with open_arena(config, "pool") as arena:
        arena.format(0, MIB, "t")
        hog = small_tmpfs / "hog"
        with hog.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 25 * MIB)
        with pytest.raises(PoolFull, match="memory of region 1"):
            arena.format(1, MIB, "t")
        arena.grow()
        assert arena.wait_grown(30)
        assert "No space left" in arena.growth_failure
        hog.unlink()
        assert arena.format(1, MIB, "t") == 4
        arena.view(int(slots_of(arena, 1, 3)[0]))[:] = bytes([1]) * MIB


def test_resident_memory_is_what_was_asked(small_tmpfs: Path) -> None:
    config = L1Config(size_bytes=16 * MIB, directory=str(small_tmpfs))
    with open_arena(config, "pool") as arena:
        arena.grow()
        assert arena.wait_grown(30)
        info = os.statvfs(small_tmpfs)
        used = (info.f_blocks - info.f_bfree) * info.f_frsize
        assert 16 * MIB <= used <= 16 * MIB + 16 * 4096
