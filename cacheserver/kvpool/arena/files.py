# SPDX-License-Identifier: Apache-2.0
"""Files of an arena's folder: names, creation, locks. Everything goes through one descriptor of the folder.

    kvpool.<pool>.v<layout>.<region>.data   the bytes; clients map this one
    kvpool.<pool>.v<layout>.<region>.head   segment page and slot headers; clients never see it
    kvpool.<pool>.lock                      held exclusively by the pool's server
    kvpool.<pool>.scopes                    names behind scope digests

A pool's uid has no dot, so names take apart in one way. No symbolic link is followed, every file has mode 0600, and no
descriptor survives an exec.

Writers: each descriptor of a data file that a client may write through is opened for it alone and carries a shared
lock. The lock belongs to the open file description, which lives as long as any copy of the descriptor or any mapping
made from it, in whatever process: an exclusive lock that succeeds proves that no writer is left, across restarts too.
"""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvpool.arena.errors import ArenaError

__all__ = ["LAYOUT_VERSION", "Folder", "Name", "PoolLock"]

LAYOUT_VERSION: Final = 1
"""Version of the files; segments of another one are swept, never read."""

_PRIVATE: Final = 0o600
_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW
_NAME: Final = re.compile(
    r"kvpool\.(?P<pool>[A-Za-z0-9-]{1,64})\.(?:v(?P<version>\d{1,9})\.(?P<region>\d{1,9})\.)?(?P<kind>data|head|scopes|lock)(?P<temp>\.tmp)?"
)


@dataclass(frozen=True, slots=True)
class Name:
    """A file's name, taken apart."""

    text: str
    pool: str
    version: int | None
    region: int | None
    kind: str
    temporary: bool


class Folder:
    """An open folder. Use as a context manager, or ``close``; any thread.

    Raises:
        ArenaError: *path* cannot be opened as a folder, or is a symbolic link.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
        except OSError as e:
            raise ArenaError(
                f"l1.directory: {path} cannot be opened as a folder ({e.strerror}); "
                "name an existing folder of the server's user on a tmpfs, not a symbolic link"
            ) from e

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def info(self) -> os.stat_result:
        """Return the folder's own stat."""
        return os.fstat(self._fd)

    def names(self) -> list[Name]:
        """Return all files that bear a name of ours, sorted."""
        matches = [_NAME.fullmatch(text) for text in sorted(os.listdir(self._fd))]  # noqa: PTH208 - by descriptor
        return [
            Name(m[0], m["pool"], _number(m["version"]), _number(m["region"]), m["kind"], m["temp"] is not None)
            for m in matches
            if m
        ]

    def create(self, name: str) -> int:
        """Create a file that must not exist, for reading and writing; the caller closes the descriptor."""
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, _PRIVATE, dir_fd=self._fd)

    def open(self, name: str, *, writable: bool = True) -> int:
        """Open a regular file anew; the caller closes the descriptor.

        Raises:
            OSError: it does not exist, is a symbolic link, or no regular file.
        """
        mode = os.O_RDWR if writable else os.O_RDONLY
        # NONBLOCK: somebody's fifo of that name must not hang the server.
        fd = os.open(name, mode | os.O_NONBLOCK | _SAFE, dir_fd=self._fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(f"{self.path / name} is no regular file")
        return fd

    @contextlib.contextmanager
    def opened(self, name: str, *, writable: bool = True) -> Iterator[int]:
        """Open as ``open`` does, for the length of a with block."""
        fd = self.open(name, writable=writable)
        try:
            yield fd
        finally:
            os.close(fd)

    def open_lock(self, name: str) -> int:
        """Open a lock file, made if need be; the caller closes the descriptor."""
        return os.open(name, os.O_RDWR | os.O_CREAT | _SAFE, _PRIVATE, dir_fd=self._fd)

    def rename(self, old: str, new: str) -> None:
        """Put *old* atomically in the place of *new*."""
        os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Unlink a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file whole: a reader sees the former content or *data*, never a part."""
        temporary = f"{name}.tmp"
        self.remove(temporary)
        with os.fdopen(self.create(temporary), "wb") as file:
            file.write(data)
        self.rename(temporary, name)

    def inode(self, name: str) -> int:
        """Return the inode that *name* has now; 0 if there is none."""
        info = self._stat(name)
        return info.st_ino if info else 0

    def size_bytes(self, name: str) -> int:
        """Return a file's length; 0 if there is none."""
        info = self._stat(name)
        return info.st_size if info else 0

    def allocated_bytes(self, name: str) -> int:
        """Return how much memory a file takes; 0 if there is none."""
        info = self._stat(name)
        return info.st_blocks * 512 if info else 0

    def changed_at(self, name: str) -> float:
        """Return when a file was last written to, seconds since 1970; 0 if there is none."""
        info = self._stat(name)
        return info.st_mtime if info else 0.0

    def writers_gone(self, name: str) -> bool:
        """Return True if no descriptor or mapping made by ``open_for_writer`` is left anywhere, or no such file."""
        try:
            with self.opened(name) as fd:
                return _locked(fd, fcntl.LOCK_EX)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # not ours to open: nothing is proven

    def open_for_writer(self, name: str) -> int:
        """Open a file for one client that may write to it; the descriptor carries the shared lock.

        Raises:
            BlockingIOError: somebody holds the lock exclusively. We never wait: a client could hold it for ever.
        """
        fd = self.open(name)
        if _locked(fd, fcntl.LOCK_SH):
            return fd
        os.close(fd)
        raise BlockingIOError(f"{self.path / name} is locked exclusively")

    def _stat(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None


class PoolLock:
    """The exclusive lock that one server of a pool holds on an arena's folder.

    Args:
        folder: the arena's.
        pool_uid: whose lock.
        quiet: leave no trace: the file says which server took it last, and when.

    Raises:
        ArenaError: another server has it; the text names its process.
    """

    def __init__(self, folder: Folder, pool_uid: str, *, quiet: bool = False) -> None:
        self._folder = folder
        self._name = f"kvpool.{pool_uid}.lock"
        self._fd = -1
        while self._fd < 0:
            self._fd = self._try(pool_uid)
        if not quiet:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self, *, remove: bool = False) -> None:
        """Let go of the lock, with *remove* unlinking its file first; idempotent."""
        if self._fd < 0:
            return
        if remove:
            self._folder.remove(self._name)
        os.close(self._fd)
        self._fd = -1

    def _try(self, pool_uid: str) -> int:
        """Return the locked descriptor, or -1 if the file was unlinked between opening and locking."""
        fd = self._folder.open_lock(self._name)
        if not _locked(fd, fcntl.LOCK_EX):
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise ArenaError(
                f"l1.directory: the arena of pool {pool_uid!r} in {self._folder.path} is in use by process {holder}; "
                "stop that server, or give this one another l1.directory or pool_uid"
            )
        if self._folder.inode(self._name) == os.fstat(fd).st_ino:
            return fd
        os.close(fd)
        return -1


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _locked(fd: int, kind: int) -> bool:
    """Take a flock without waiting; False if somebody's is in the way."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
