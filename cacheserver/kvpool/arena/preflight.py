# SPDX-License-Identifier: Apache-2.0
"""Checks before an arena is opened: each refusal names the field, the numbers and the remedy.

The checks are pure; what they know of the machine comes through ``Machine``, so a test can be any machine.
"""

import os
import resource
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.arena.errors import ArenaError
from kvpool.arena.sizes import Sizes
from kvpool.config import L1Config

__all__ = ["OVERHEAD_BYTES", "Machine", "check_folder", "check_memory", "memory_limit", "real_machine"]

OVERHEAD_BYTES: Final = 256 << 20
"""What the server's process takes beside the arena: 59 MiB with all modules loaded, then index and requests."""

_FILES_BESIDE: Final = 256
"""Descriptors for sockets and logs, beside two mappings a region."""

_UNLIMITED: Final = 1 << 60
"""Version 1 of cgroups says no limit with a number near 2**63."""


@dataclass(frozen=True, slots=True)
class Machine:
    """How to ask the machine."""

    read_text: Callable[[str], str | None]
    """Content of a small file; None if it cannot be read."""
    free_bytes: Callable[[Path], int]
    """What the file system of a folder has left for us."""
    user: int
    files_limit: Callable[[int], int]
    """Raise the limit of open files to at least the given number where allowed; returns the limit then."""


def real_machine() -> Machine:
    """Return this machine."""
    return Machine(_read_text, _free_bytes, os.geteuid(), _raise_files_limit)


def check_folder(path: Path, info: os.stat_result, machine: Machine, *, allow_disk: bool) -> None:
    """Refuse a folder that others can change, that is not ours to write, or that is on a disk.

    Raises:
        ArenaError: with the remedy.
    """
    if info.st_uid not in (machine.user, 0):
        raise ArenaError(
            f"l1.directory: {path} belongs to user {info.st_uid} and this server is user {machine.user}; "
            "use a folder of its own"
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ArenaError(
            f"l1.directory: {path} has mode {stat.S_IMODE(info.st_mode):04o}, so others could replace segments; "
            f"use a folder below it, such as {path / 'kvpool'} (it is made with mode 0700), or chmod 0700"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ArenaError(
            f"l1.directory: {path} is not writable for user {machine.user}; chown it or use another folder"
        )
    kind = _file_system(info.st_dev, machine)
    if kind != "tmpfs" and not allow_disk:
        raise ArenaError(
            f"l1.directory: {path} is on {kind or 'an unknown file system'}, not on a tmpfs; "
            "use a folder on one (/dev/shm, an emptyDir of medium Memory), or set l1.allow_disk for experiments"
        )


def check_memory(config: L1Config, sizes: Sizes, adopted_bytes: int, machine: Machine) -> None:
    """Refuse a size that the file system, the cgroup, the machine or the limit of open files cannot hold.

    Args:
        config: what was asked for.
        sizes: how it is cut.
        adopted_bytes: what the segments to be adopted have already taken.
        machine: whom to ask.

    Raises:
        ArenaError: with the numbers and the remedy.
    """
    need = sizes.needed_bytes
    _fits(
        config,
        need,
        machine.free_bytes(Path(config.directory)) + adopted_bytes,
        "room of the file system of l1.directory",
        "remount it larger",
    )
    if (limit := memory_limit(machine)) is not None:
        _fits(
            config,
            need + OVERHEAD_BYTES,
            limit[0],
            f"memory limit {limit[1]}",
            "raise the limit of the container or service",
        )
    if not config.allow_disk and (available := _available(machine)) is not None:
        _fits(
            config,
            need + OVERHEAD_BYTES,
            available + adopted_bytes,
            "memory that the machine has available",
            "free some",
        )
    _check_files(sizes, machine)


def memory_limit(machine: Machine) -> tuple[int, str] | None:
    """Return the lowest memory limit of the cgroups that this process is in, and its file; None without any."""
    found = []
    for line in (machine.read_text("/proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found += _limits("/sys/fs/cgroup", path, "memory.max", machine)
        elif "memory" in controllers.split(","):
            found += _limits("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", machine)
    return min(found, default=None)


def _limits(root: str, path: str, name: str, machine: Machine) -> list[tuple[int, str]]:
    """Limits from the process's own group up to the root, which is all that a container may see."""
    files = [str(Path(root) / folder.relative_to("/") / name) for folder in (Path(path), *Path(path).parents)]
    texts = [(machine.read_text(file) or "").strip() for file in files]
    return [(int(t), f) for t, f in zip(texts, files, strict=True) if t.isdigit() and int(t) < _UNLIMITED]


def _fits(config: L1Config, need: int, have: int, what: str, remedy: str) -> None:
    if need > have:
        least = max(config.size_bytes - (need - have), 0)
        raise ArenaError(
            f"l1.size_bytes: {config.size_bytes} bytes need {need} with headers and overhead, "
            f"but the {what} is {have} bytes; lower l1.size_bytes to at most {least}, or {remedy}"
        )


def _available(machine: Machine) -> int | None:
    for line in (machine.read_text("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _file_system(device: int, machine: Machine) -> str:
    """Kind of the file system with a device number; empty if the kernel does not say."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in (machine.read_text("/proc/self/mountinfo") or "").splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return source.split()[0]
    return ""


def _check_files(sizes: Sizes, machine: Machine) -> None:
    need = 2 * sizes.regions + _FILES_BESIDE
    if (limit := machine.files_limit(need)) < need:
        raise ArenaError(
            f"l1.segment_bytes: {sizes.regions} segments need {need} open files, the limit is {limit}; "
            "raise the limit (ulimit -n) or use larger segments"
        )


def _read_text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _free_bytes(path: Path) -> int:
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def _raise_files_limit(wanted: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    if hard == resource.RLIM_INFINITY or hard > soft:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
