# SPDX-License-Identifier: Apache-2.0
"""Client-moved mode: this process maps the server's regions and copies between them and its blocks."""

from collections.abc import Sequence

import numpy as np

from kvpool.client.channel import Errand, Fill, Use, Wanted
from kvpool.client.segments import Segments
from kvpool.model.checksum import checksum
from kvpool.model.errors import CacheError, ServerUnavailable

__all__ = ["MappedReader", "MappedWriter"]


class MappedWriter:
    """A Writer straight into the slots."""

    def __init__(self, errand: Errand) -> None:
        self._errand = errand

    def put(self, chunk: int, row: np.void, fill: Fill) -> bytes:
        """Write one chunk into its slot; see Writer."""
        del chunk
        with self._errand.link.gate.copying(self._errand.epoch):
            slot = _segments(self._errand).writing(*_part(row))
            fill(slot)
            return checksum(slot)

    def finish(self) -> frozenset[int]:
        """Nothing is under way."""
        return frozenset()


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


def _part(row: np.void) -> tuple[int, int, int]:
    return int(row["memory"]), int(row["offset"]), int(row["length"])
