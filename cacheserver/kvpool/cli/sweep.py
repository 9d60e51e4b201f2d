# SPDX-License-Identifier: Apache-2.0
"""`kvpool sweep`: remove what deleted pools left on a node. Nothing that lives is touched, and nothing by guess.

Servers sweep the memory folder themselves where pools keep L1 on the node; this is for nodes without such a server.
"""

import argparse
import contextlib
import datetime as dt
import fcntl
import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from kvpool.arena.errors import ArenaError
from kvpool.arena.files import Folder
from kvpool.arena.leftovers import Fate, Living, sweep_other_pools
from kvpool.cli.errors import Failure, UsageError

__all__ = ["run", "sweep_sockets"]

_SOCKET_NAME: Final = re.compile(r"kvpool\.sock(\..+)?")
_LOCK: Final = "kvpool.sock.lock"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Metadata(Struct, frozen=True, kw_only=True):
    name: str
    namespace: str
    uid: Annotated[str, Meta(min_length=1)]


class _Item(Struct, frozen=True, kw_only=True):
    kind: str
    metadata: _Metadata


class _Page(Struct, frozen=True, kw_only=True, rename={"following": "continue"}):
    following: str = ""


class _Pools(Struct, frozen=True, kw_only=True, rename={"api_version": "apiVersion"}):
    """The answer of `kubectl get kvp --all-namespaces --output json`."""

    api_version: str
    kind: str
    items: tuple[_Item, ...]
    metadata: _Page = _Page()


def run(args: argparse.Namespace) -> int:
    """Sweep both folders, one line for each thing found.

    Raises:
        UsageError: the list of pools is none, or not whole.
        Failure: a folder cannot be read.
    """
    pools = _read(args.pools)
    if not pools and not args.none_exist:
        raise UsageError("--pools: the list is empty; if really no pool exists any more, say --none-exist")
    listed_at = dt.datetime.now(dt.UTC).timestamp()
    living = Living({p.uid for p in pools}, listed_at, args.older_than)
    try:
        for pool, fate in _memory(Path(args.directory), living, remove=not args.dry_run).items():
            _tell(f"memory of pool {pool}", fate, dry_run=args.dry_run)
        names = {(p.namespace, p.name) for p in pools}
        aged = _Aged(listed_at - args.older_than, remove=not args.dry_run)
        for folder, fate in sweep_sockets(Path(args.sockets), names, aged).items():
            _tell(f"sockets in {folder}", fate, dry_run=args.dry_run)
    except OSError as e:
        raise Failure(f"{e.filename}: {e.strerror}") from e
    return 0


def _tell(what: str, fate: Fate, *, dry_run: bool) -> None:
    text = f"kept: {fate}" if fate is not Fate.REMOVED else "would be removed" if dry_run else "removed"
    print(f"{what}: {text}")


def _read(path: str) -> tuple[_Metadata, ...]:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        pools = msgspec.json.decode(data, type=_Pools)
    except OSError as e:
        raise UsageError(f"--pools {path}: {e.strerror}") from e
    except msgspec.MsgspecError as e:
        raise UsageError(f"--pools: {e}; it takes what `kubectl get kvp --all-namespaces --output json` prints") from e
    foreign = sorted({i.kind for i in pools.items} - {"KVCachePool"})
    if foreign or not pools.kind.endswith("List"):
        raise UsageError(f"--pools: a {pools.kind} with {', '.join(foreign) or 'pools'}; it takes a list of all pools")
    if pools.metadata.following:
        raise UsageError("--pools: a page of a longer list; it takes all pools")
    return tuple(i.metadata for i in pools.items)


def _memory(path: Path, living: Living, *, remove: bool) -> dict[str, Fate]:
    if not path.is_dir():
        return {}
    try:
        with Folder(path) as folder:
            return sweep_other_pools(folder, living, remove=remove)
    except ArenaError as e:
        raise Failure(str(e).replace("l1.directory", "--directory")) from e


@dataclass(frozen=True, slots=True)
class _Aged:
    before_at: float
    """Only what was last used before, seconds since 1970."""

    remove: bool


def sweep_sockets(root: Path, living: set[tuple[str, str]], aged: _Aged) -> dict[str, Fate]:
    """Remove sockets of deleted pools below *root*, which has a folder for each namespace and in it one for each pool.

    The folders stay: an engine that is still alive has its pool's mounted, and would not see the sockets of a new pool
    of that name if it were another folder.
    """
    if not root.is_dir():
        return {}
    found: dict[str, Fate] = {}
    for namespace, namespace_fd in _folders(root, None):
        for name, fd in _folders(root / namespace, namespace_fd):
            if (namespace, name) not in living and (fate := _sweep_folder(fd, aged)) is not None:
                found[str(root / namespace / name)] = fate
    return found


def _folders(path: Path, fd: int | None) -> Iterator[tuple[str, int]]:
    """Open each folder in *path*, never through a link; closed again after its turn."""
    with contextlib.ExitStack() as opened:
        if fd is None:
            fd = os.open(path, _FOLDER)
            opened.callback(os.close, fd)
        for name in sorted(os.listdir(fd)):  # noqa: PTH208 - by descriptor
            try:
                inner = os.open(name, _FOLDER, dir_fd=fd)
            except (NotADirectoryError, FileNotFoundError, OSError):
                continue
            try:
                yield name, inner
            finally:
                os.close(inner)


def _sweep_folder(fd: int, aged: _Aged) -> Fate | None:
    """Remove a pool's sockets unless a server holds their lock; None if there are none."""
    names = [n for n in sorted(os.listdir(fd)) if _SOCKET_NAME.fullmatch(n) and _is_ours(fd, n)]
    if not names:
        return None
    if any(os.stat(n, dir_fd=fd, follow_symlinks=False).st_mtime > aged.before_at for n in names):
        return Fate.YOUNG
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The lock's own file stays: to remove it would race with the next server.
        for name in [n for n in names if n != _LOCK] if aged.remove else []:
            os.unlink(name, dir_fd=fd)
    except BlockingIOError:
        return Fate.SERVED
    finally:
        os.close(lock)
    return Fate.REMOVED if names != [_LOCK] else None


def _is_ours(fd: int, name: str) -> bool:
    mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
    return stat.S_ISSOCK(mode) or (name == _LOCK and stat.S_ISREG(mode))
