# SPDX-License-Identifier: Apache-2.0
"""CURVE keys in files: made with the narrowest rights, read only when nobody else could have read them."""

import os
import stat
from pathlib import Path
from typing import Final

from kvpool.server.sockets import curve_pair, curve_public

__all__ = ["KEY_BYTES", "KeyFileError", "make_key", "read_key"]

KEY_BYTES: Final = 40
"""A key in Z85."""


class KeyFileError(Exception):
    """A key file cannot be used; the text names the file and the remedy, never the key."""


def make_key(path: str) -> str:
    """Write a new secret key to *path*, mode 0600, and return the public half (Z85) for the clients.

    Raises:
        KeyFileError: the file exists, or it cannot be written.
    """
    public, secret = curve_pair()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as e:
        raise KeyFileError(f"{path} exists; a key is never overwritten: remove it or name another file") from e
    except OSError as e:
        raise KeyFileError(f"{path}: {e.strerror}; name a file in a folder that this user may write to") from e
    with os.fdopen(fd, "wb") as file:
        file.write(secret + b"\n")
    return public.decode("ascii")


def read_key(path: str) -> tuple[bytes, bytes]:
    """Return the (public, secret) key of *path*.

    Raises:
        KeyFileError: it is not there, holds no key, or others can read or change it.
    """
    try:
        with Path(path).open("rb") as file:
            _check_rights(path, os.fstat(file.fileno()))
            secret = file.read(KEY_BYTES * 2).strip()
    except OSError as e:
        raise KeyFileError(f"{path}: {e.strerror}; make a key with `kvpool keys`") from e
    if len(secret) != KEY_BYTES:
        raise KeyFileError(f"{path}: {len(secret)} bytes, a key has {KEY_BYTES}; make one with `kvpool keys`")
    try:
        return curve_public(secret), secret
    except ValueError as e:
        raise KeyFileError(f"{path}: holds no key in Z85; make one with `kvpool keys`") from e


def _check_rights(path: str, found: os.stat_result) -> None:
    """Refuse a key that others can reach.

    A mounted Secret belongs to another user, and its group is the only way in: then, and only then, may the group read.
    """
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"{path}: is no file")
    too_wide = 0o037 if found.st_uid != os.getuid() else 0o077
    mode = stat.S_IMODE(found.st_mode)
    if mode & too_wide:
        raise KeyFileError(f"{path}: mode {mode:04o} lets others at the key; run chmod 0600 {path}")
