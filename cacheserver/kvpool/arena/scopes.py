# SPDX-License-Identifier: Apache-2.0
"""The names behind scope digests, kept in a small file beside the segments.

A header has only the digest of (tenant, namespace); after a restart the server needs the names to clear by tenant or
model and to count by tenant. The file is replaced whole, so a crash leaves the former or the new one.
"""

from typing import Final

import msgspec

from kvpool.arena.files import Folder

__all__ = ["MOST_SCOPES", "Scopes"]

MOST_SCOPES: Final = 65536
"""More than limits.namespaces can be known at a time, since scopes outlive their clients; the oldest go first."""

_LONGEST_BYTES: Final = 64 << 20
_Entry = tuple[bytes, str, str, bytes]
_decoder: Final = msgspec.msgpack.Decoder(list[_Entry])


class Scopes:
    """All scopes that the arena remembers; the thread that owns the arena alone."""

    def __init__(self, folder: Folder, pool_uid: str, most: int = MOST_SCOPES) -> None:
        self._folder, self._most = folder, most
        self._name = f"kvpool.{pool_uid}.scopes"
        self._known = self._load()

    def known(self) -> dict[bytes, tuple[str, str, bytes]]:
        """Return a copy of all: scope digest to (tenant, model, namespace)."""
        return dict(self._known)

    def remember(self, scope: bytes, tenant: str, model: str, namespace: bytes) -> None:
        """Keep one; costs nothing if it is known already.

        Raises:
            OSError: the file cannot be written (the folder is full); it is kept in memory all the same.
        """
        entry = (tenant, model, namespace)
        if self._known.get(scope) == entry:
            return
        self._known.pop(scope, None)
        while len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        self._known[scope] = entry
        self._folder.replace(self._name, msgspec.msgpack.encode([(s, *e) for s, e in self._known.items()]))

    def remove(self) -> None:
        """Remove the file."""
        self._folder.remove(self._name)

    def _load(self) -> dict[bytes, tuple[str, str, bytes]]:
        """Read the file; one that is missing, too long or damaged means that no names are known."""
        if not 0 < self._folder.size_bytes(self._name) <= _LONGEST_BYTES:
            return {}
        try:
            with self._folder.opened(self._name, writable=False) as fd, open(fd, "rb", closefd=False) as file:
                entries = _decoder.decode(file.read(_LONGEST_BYTES))
        except (OSError, msgspec.DecodeError):
            return {}
        return {scope: (tenant, model, namespace) for scope, tenant, model, namespace in entries[-self._most :]}
