# SPDX-License-Identifier: Apache-2.0
"""Which weights a model or an adapter really is. A path or name is never an identity: the cache outlives engines.

In order: the hub's commit; else a fingerprint of all configuration and weight files. A file is read once: its digest
is kept by path, size and time of change in a file of the user's cache folder, under a lock, so that the ranks of one
engine do not read the same weights side by side.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TextIO

import blake3
import msgspec

__all__ = ["Unidentified", "adapter_fingerprint", "files_fingerprint", "model_fingerprint"]

_COMMIT: Final = re.compile(r"^[0-9a-f]{40}$")
_CONTENT: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model", ".py", ".tensors")


class Unidentified(ValueError):
    """Nothing tells which weights these are; what cannot be identified is not cached."""


def model_fingerprint(model: str, revision: str | None, cache: Path | None) -> str:
    """Identify the weights that an engine loaded from *model*.

    Args:
        model: a folder, or a name on the hub.
        revision: what the engine resolved the name's revision to, if it did.
        cache: folder for the digests of files; None keeps none.

    Raises:
        Unidentified: it is neither a folder nor a name with a known commit.
    """
    path = Path(model)
    if path.is_dir():
        # The hub's cache names a snapshot's folder by its commit.
        if path.parent.name == "snapshots" and _COMMIT.match(path.name):
            return f"hub:{path.name}"
        return files_fingerprint(path, cache)
    if path.is_file():
        return _combined([(path.name, path)], cache)
    if revision and _COMMIT.match(revision):
        return f"hub:{revision}"
    raise Unidentified(
        f"{model!r} is no local folder and its revision {revision!r} is no commit; pass --revision COMMIT"
    )


def adapter_fingerprint(path: str, cache: Path | None) -> str:
    """Identify the weights of an adapter.

    Raises:
        Unidentified: *path* is no local folder.
    """
    if not path or not Path(path).is_dir():
        raise Unidentified(f"adapter {path!r} is no local folder")
    return files_fingerprint(Path(path), cache)


def files_fingerprint(folder: Path, cache: Path | None) -> str:
    """Return a fingerprint of the names and contents of all configuration and weight files under *folder*.

    Raises:
        Unidentified: there is no such file.
    """
    files = sorted(
        (str(p.relative_to(folder)), p) for p in folder.rglob("*") if p.suffix.lower() in _CONTENT and p.is_file()
    )
    if not files:
        raise Unidentified(f"{folder} holds no configuration or weight files")
    return _combined(files, cache)


def _combined(files: Iterable[tuple[str, Path]], cache: Path | None) -> str:
    with _digests(cache) as known:
        parts = [(name, _digest(path, known)) for name, path in files]
    return "files:" + blake3.blake3(b"kvpool.files.1" + msgspec.msgpack.encode(parts)).hexdigest()


def _digest(path: Path, known: dict[str, str]) -> str:
    stat = path.stat()
    key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    if key not in known:
        hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
        hasher.update_mmap(path)
        known[key] = hasher.hexdigest()
    return known[key]


@contextlib.contextmanager
def _digests(cache: Path | None) -> Iterator[dict[str, str]]:
    """Lend the digests of files that were read before, and keep what was added."""
    with contextlib.ExitStack() as stack:
        if cache is None or (lock := _lock_file(cache)) is None:
            yield {}
            return
        fcntl.flock(stack.enter_context(lock), fcntl.LOCK_EX)
        store = cache / "files.json"
        known = _read(store)
        before = len(known)
        yield known
        if len(known) != before:
            fresh = store.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(OSError):
                fresh.write_bytes(msgspec.json.encode(known))
                fresh.replace(store)


def _lock_file(cache: Path) -> TextIO | None:
    """Open the lock; None in a read-only home, where every start reads the files again."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return (cache / "files.lock").open("w")
    except OSError:
        return None


def _read(store: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(store.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}
