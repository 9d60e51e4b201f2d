# SPDX-License-Identifier: Apache-2.0
"""The file that a server was configured from: read again when it changes, noticed through the kernel, never by asking.

The folder is watched, not the file: an editor puts a new file in the place of the old one, and a mounted ConfigMap
changes by a link beside it.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import structlog

from kvpool.config import ServerConfig

__all__ = ["ConfigFile"]

log = structlog.get_logger()

_CLOSE_WRITE: Final = 0x08
_MOVED_TO: Final = 0x80
_CREATE: Final = 0x100
_EVENTS: Final = _CLOSE_WRITE | _MOVED_TO | _CREATE
_READ_BYTES: Final = 64 << 10


class ConfigFile:
    """One file and how to read a configuration from its content. Thread: the loop's, once ``watch`` was called.

    Args:
        path: the file.
        decode: content to configuration; raises ConfigError.
    """

    def __init__(self, path: str, decode: Callable[[bytes], ServerConfig]) -> None:
        self._path = Path(path)
        self._decode = decode
        self._content = self._path.read_bytes()
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def written_at(self) -> float:
        """When the file was written, in seconds since 1970."""
        return self._path.stat().st_mtime

    def watch(self) -> int:
        """Begin to watch; returns a descriptor that is readable after a change, or -1 if the kernel has none left."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0 and libc.inotify_add_watch(self._fd, os.fsencode(self._path.parent), _EVENTS) < 0:
            error = ctypes.get_errno()
            self.close()
            ctypes.set_errno(error)
        if self._fd < 0:
            log.warning("config.not_watched", path=str(self._path), error=errno.errorcode.get(ctypes.get_errno(), ""))
        return self._fd

    def changed(self) -> ServerConfig | None:
        """Return the new configuration if the file has another content than before; never blocks.

        Raises:
            ConfigError: the new content is wrong; said once for each content.
        """
        self._drain()
        try:
            content = self._path.read_bytes()
        except OSError:
            return None  # between two files; its end is the next event
        if content == self._content:
            return None
        self._content = content
        return self._decode(content)

    def _drain(self) -> None:
        try:
            while os.read(self._fd, _READ_BYTES):
                pass
        except BlockingIOError:
            return
