# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

import pytest
from tests.fakes.arenas_on_disk import machine

from kvpool.arena.errors import ArenaError
from kvpool.arena.preflight import OVERHEAD_BYTES, check_folder, check_memory, memory_limit, real_machine
from kvpool.arena.sizes import sizes_of
from kvpool.config import L1Config

GIB = 1 << 30
CONFIG = L1Config(size_bytes=8 * GIB, directory="/arena")
SIZES = sizes_of(CONFIG)
NEED = 8 * GIB + 32 * (1 << 20) + 32 * 4096
MOUNTS = "24 27 0:6 / /dev rw - devtmpfs devtmpfs rw\n30 25 {} / /arena rw,relatime - {} none rw\n"


def info(mode: int = 0o40700, user: int = 1000, device: int = os.makedev(0, 27)) -> os.stat_result:
    return os.stat_result((mode, 1, device, 1, user, 0, 0, 0, 0, 0))


def mounted(kind: str) -> dict[str, str]:
    return {"/proc/self/mountinfo": MOUNTS.format("0:27", kind)}


def test_a_private_folder_on_a_tmpfs_is_fine(tmp_path: Path) -> None:
    check_folder(tmp_path, info(), machine(mounted("tmpfs"), user=1000), allow_disk=False)


def test_a_disk_is_refused_unless_allowed(tmp_path: Path) -> None:
    disk = machine(mounted("ext4"), user=1000)

    with pytest.raises(ArenaError, match=r"l1\.directory.*is on ext4, not on a tmpfs.*l1\.allow_disk"):
        check_folder(tmp_path, info(), disk, allow_disk=False)
    check_folder(tmp_path, info(), disk, allow_disk=True)


@pytest.mark.parametrize("mode", [0o40720, 0o40702, 0o41777])
def test_a_folder_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ArenaError, match=rf"l1\.directory.*mode {mode & 0o7777:04o}.*kvpool.*0700"):
        check_folder(tmp_path, info(mode), machine(mounted("tmpfs"), user=1000), allow_disk=False)


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"l1\.directory.*user 7 .*user 1000"):
        check_folder(tmp_path, info(user=7), machine(mounted("tmpfs"), user=1000), allow_disk=False)


def test_a_folder_that_is_not_writable_is_refused() -> None:
    with pytest.raises(ArenaError, match=r"l1\.directory: /arena is not writable"):
        check_folder(Path("/arena"), info(user=0), machine(mounted("tmpfs"), user=1000), allow_disk=False)


def test_the_file_system_must_hold_the_arena_and_its_headers() -> None:
    check_memory(CONFIG, SIZES, 0, machine(free_bytes=NEED))

    with pytest.raises(ArenaError) as e:
        check_memory(CONFIG, SIZES, 0, machine(free_bytes=NEED - 1))
    assert f"l1.size_bytes: {8 * GIB} bytes need {NEED}" in str(e.value)
    assert f"file system of l1.directory is {NEED - 1} bytes; lower l1.size_bytes to at most {8 * GIB - 1}" in str(
        e.value
    )


def test_adopted_segments_have_taken_their_room_already() -> None:
    check_memory(CONFIG, SIZES, 3 * GIB, machine(free_bytes=NEED - 3 * GIB))


CGROUPS = {
    "version 2": ("0::/pod/container\n", "/sys/fs/cgroup/pod/container/memory.max"),
    "version 2, seen from inside": ("0::/\n", "/sys/fs/cgroup/memory.max"),
    "version 2, limit above": ("0::/pod/container\n", "/sys/fs/cgroup/pod/memory.max"),
    "version 1": ("5:cpu:/x\n4:memory:/pod/c\n0::/\n", "/sys/fs/cgroup/memory/pod/c/memory.limit_in_bytes"),
    "version 1, seen from inside": ("4:hugetlb,memory:/pod/c\n", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
}


@pytest.mark.parametrize(("groups", "file"), CGROUPS.values(), ids=CGROUPS)
def test_a_cgroup_limit_must_hold_the_arena_and_the_server(groups: str, file: str) -> None:
    def limited(limit: int) -> dict[str, str]:
        return {"/proc/self/cgroup": groups, file: f"{limit}\n"}

    check_memory(CONFIG, SIZES, 0, machine(limited(NEED + OVERHEAD_BYTES)))
    with pytest.raises(ArenaError, match=rf"l1\.size_bytes.*memory limit {file} is {NEED} bytes; lower .* at most \d+"):
        check_memory(CONFIG, SIZES, 0, machine(limited(NEED)))


@pytest.mark.parametrize("text", ["max", str((1 << 63) - 4096), "", "junk"])
def test_no_limit_is_no_limit(text: str) -> None:
    files = {
        "/proc/self/cgroup": "4:memory:/\n0::/\n",
        "/sys/fs/cgroup/memory.max": text,
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": text,
    }

    assert memory_limit(machine(files)) is None


def test_the_lowest_of_all_limits_counts() -> None:
    files = {
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/b/memory.max": "300\n",
        "/sys/fs/cgroup/a/memory.max": "200\n",
        "/sys/fs/cgroup/memory.max": "max\n",
    }

    assert memory_limit(machine(files)) == (200, "/sys/fs/cgroup/a/memory.max")


def test_the_machine_must_have_the_memory() -> None:
    def with_available(size: int) -> dict[str, str]:
        return {"/proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {size // 1024} kB\n"}

    check_memory(CONFIG, SIZES, GIB, machine(with_available(NEED + OVERHEAD_BYTES - GIB)))
    with pytest.raises(ArenaError, match=r"l1\.size_bytes.*machine has available"):
        check_memory(CONFIG, SIZES, 0, machine(with_available(NEED + OVERHEAD_BYTES - 1024)))


def test_descriptors_must_suffice() -> None:
    check_memory(CONFIG, SIZES, 0, machine(files=320))

    with pytest.raises(ArenaError, match=r"l1\.segment_bytes: 32 segments need 320 open files, the limit is 319"):
        check_memory(CONFIG, SIZES, 0, machine(files=319))


def test_this_machine_answers(tmp_path: Path) -> None:
    real = real_machine()

    assert real.free_bytes(tmp_path) > 0
    assert real.user == os.geteuid()
    assert "MemAvailable" in (real.read_text("/proc/meminfo") or "")
    assert real.read_text(str(tmp_path / "none")) is None
    assert real.files_limit(16) >= 16
