# SPDX-License-Identifier: Apache-2.0
"""Unix socket paths: one server each, leftovers replaced, permissions right from the first moment."""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["ListenError", "SocketLock", "claim", "created_with"]

_LOCK_SUFFIX: Final = ".lock"


class ListenError(Exception):
    """An address cannot be served; the text names the setting and the remedy."""


class SocketLock:
    """Shows that this process serves one path; ends with ``close`` or with the process, however that ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Give the path up; the lock's file stays, since removing it would race with the next server. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def claim(path: str, mode: int) -> SocketLock:
    """Make *path* free to bind: its folder is there, no living server uses it, a leftover is removed.

    Args:
        path: where the socket will be.
        mode: permission bits that it will get; a folder that is made here gives access to the same classes of users.

    Raises:
        ListenError: another server listens there, the path is something else, or it is not permitted.
    """
    target = Path(path)
    try:
        _make_folder(target.parent, mode)
        lock = _lock(target)
    except PermissionError as e:
        raise ListenError(
            f"listen.socket_path: {e.filename or path}: not permitted for user {os.getuid()}; "
            "give this user write access to the folder or name another path"
        ) from e
    except OSError as e:
        raise ListenError(f"listen.socket_path: {path}: {e.strerror}; name another path") from e
    try:
        _remove_leftover(target)
    except ListenError:
        lock.close()
        raise
    return lock


def _make_folder(folder: Path, mode: int) -> None:
    """Create *folder* with all rights for each class of users that *mode* gives any right to."""
    if folder.is_dir():
        return
    rights = 0o700 | (0o070 if mode & 0o070 else 0) | (0o005 if mode & 0o007 else 0)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(rights)


def _lock(target: Path) -> SocketLock:
    try:
        return SocketLock(target.with_name(target.name + _LOCK_SUFFIX))
    except BlockingIOError as e:
        raise _taken(target) from e


def _remove_leftover(target: Path) -> None:
    try:
        found = target.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found):
        raise ListenError(f"listen.socket_path: {target} exists and is no socket; remove it or name another path")
    if _somebody_listens(target):
        raise _taken(target)
    target.unlink(missing_ok=True)


def _somebody_listens(target: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        result = probe.connect_ex(str(target))
    # EAGAIN: its queue of connections is full, so there is one.
    return result in (0, errno.EAGAIN, errno.EINPROGRESS, errno.EACCES, errno.EPERM)


def _taken(target: Path) -> ListenError:
    return ListenError(f"listen.socket_path: another server listens on {target}; stop it or name another path")


@contextmanager
def created_with(mode: int) -> Iterator[None]:
    """Let files that are made inside have exactly *mode*, so that there is no moment with wider rights.

    Thread: only before any other thread runs, since the mask belongs to the process.
    """
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)
