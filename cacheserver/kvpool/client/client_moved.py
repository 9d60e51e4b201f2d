# SPDX-License-Identifier: Apache-2.0
"""Client-moved mode: this process maps the server's regions and copies between them and its blocks."""

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cache
from typing import Final

import numpy as np

from kvpool.client.channel import Errand, Fill, Use, Wanted
from kvpool.client.segments import Segments
from kvpool.model.checksum import checksum
from kvpool.model.errors import CacheError, ServerUnavailable

__all__ = ["MappedReader", "MappedWriter"]


_Part = tuple[int, int, int]
"""Memory, offset, length."""

_CHECKING_THREADS: Final = 4
"""One of them makes checksums of 8 to 15 GB/s, a copy engine moves 55."""


class MappedWriter:
    """A Writer straight into the slots.

    What copy engines brought is not in a cache of this CPU: its checksum is made beside the next copies.
    """

    def __init__(self, errand: Errand) -> None:
        self._errand = errand
        self._beside = errand.link.locks is not None
        self._made: dict[int, bytes] = {}
        self._due: dict[int, Future[bytes]] = {}

    def put(self, chunk: int, row: np.void, fill: Fill) -> None:
        """Write one chunk into its slot; see Writer."""
        part = _part(row)
        with self._errand.link.gate.copying(self._errand.epoch):
            slot = _segments(self._errand).writing(*part)
            fill(slot)
            if not self._beside:
                self._made[chunk] = checksum(slot)
        if self._beside:
            self._due[chunk] = _checking().submit(self._checksum, part)

    def finish(self) -> dict[int, bytes]:
        """Wait for the checksums; see Writer."""
        for chunk, due in self._due.items():
            try:
                self._made[chunk] = due.result()
            except CacheError:
                continue  # the session is over
        return self._made

    def _checksum(self, part: _Part) -> bytes:
        with self._errand.link.gate.copying(self._errand.epoch):
            return checksum(_segments(self._errand).writing(*part))


@cache
def _checking() -> Executor:
    """Return threads that wait for work as long as the process lives."""
    return ThreadPoolExecutor(_CHECKING_THREADS, "kvpool-checksums")


class MappedReader:
    """A Reader straight out of the slots."""

    def __init__(self, errand: Errand) -> None:
        self._errand = errand

    def each(self, wanted: Sequence[Wanted], use: Use) -> None:
        """Show each chunk in its slot; see Reader."""
        for item in wanted:
            try:
                with self._errand.link.gate.copying(self._errand.epoch):
                    use(item.chunk, _segments(self._errand).reading(*_part(item.row)))
            except CacheError:
                continue  # never used: lost


def _segments(errand: Errand) -> Segments:
    if (segments := errand.link.segments) is None:
        raise ServerUnavailable("the server hands out no segments")
    return segments


def _part(row: np.void) -> _Part:
    return int(row["memory"]), int(row["offset"]), int(row["length"])
