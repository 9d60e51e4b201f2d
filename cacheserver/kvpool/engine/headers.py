# SPDX-License-Identifier: Apache-2.0
"""Header rows of slots: what makes a chunk's key, who writes it, and how long it is."""

import numpy as np
from numpy.typing import NDArray

from kvpool.index.tables import KeyTable
from kvpool.model.keys import DIGEST_BYTES
from kvpool.model.slots import NO_DIGEST, header_rows

__all__ = ["chained_rows", "filled_rows"]


def filled_rows(
    table: KeyTable, keys: list[bytes], ordinals: NDArray[np.int64], length: int, writer: bytes
) -> NDArray[np.void]:
    """Return the header rows of some chunks of one table, without parents."""
    rows = header_rows(len(keys))
    rows["scope"] = np.void(table.scope.digest)
    rows["digest"] = np.frombuffer(b"".join(keys), dtype=f"V{DIGEST_BYTES}")
    rows["writer"] = np.void(writer)
    rows["length"] = length
    rows["ordinal"] = ordinals
    rows["group"] = table.group
    rows["shard"] = table.shard
    return rows


def chained_rows(rows: NDArray[np.void], chain: list[bytes], at: NDArray[np.int64], parent: bytes) -> NDArray[np.void]:
    """Fill in the parents of *rows*, which are the chunks *at* some places of *chain*; *parent* stands before it."""
    digests = np.frombuffer(b"".join((parent or NO_DIGEST, *chain)), dtype=f"V{DIGEST_BYTES}")
    rows["parent"] = digests[at]
    return rows
