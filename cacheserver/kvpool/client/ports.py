# SPDX-License-Identifier: Apache-2.0
"""What the client needs from whoever owns the paged cache: an engine's connector, or an array in a test."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockPort", "PageLocks"]


class PageLocks(Protocol):
    """Keeps pages of mapped memory in place, so that copy engines of the engine's device reach them. Any thread."""

    def lock(self, address: int, length: int, *, writable: bool) -> bool:
        """Lock the pages of a mapping, which *writable* allows to write to; False if the device refuses.

        Takes 0.04 s/GiB once the pages are there.
        """

    def unlock(self, address: int) -> None:
        """Undo ``lock``: no copy uses the mapping any more, and it is still there."""


class BlockPort(Protocol):
    """The blocks of one engine process.

    Both calls come from the client's two transfer threads (stores from one, loads from the other), never two of one
    kind at a time, and return only when they are done with *out* or *data*: neither may be kept.

    The client grants: ids of one chunk are distinct and not negative, but for NOWHERE (of ``kvpool.model.layout``; only
    in gathers, which fill such a block's bytes with zeros), and the memory has exactly the chunk's bytes.
    The implementer owes: an exception for an id that is out of range, before anything of the engine is touched.
    """

    @property
    def locks(self) -> PageLocks | None:
        """Who locks mapped memory for these blocks; None if no copy engine moves them."""

    def gather(self, group: int, block_ids: NDArray[np.int64], out: memoryview) -> None:
        """Copy the blocks of one chunk into *out*, all of it (writable, format ``B``).

        Args:
            group: cache group of the registered layout.
            block_ids: the chunk's blocks in token order, shape (blocks per chunk,).
            out: ``shard_bytes`` of the group.
        """

    def scatter(self, group: int, block_ids: NDArray[np.int64], skip_blocks: int, data: memoryview) -> None:
        """Copy one chunk into its blocks, without the first *skip_blocks* of them, which are not touched.

        Args:
            group: cache group of the registered layout.
            block_ids: the chunk's blocks in token order, shape (blocks per chunk,).
            skip_blocks: how many at the start are left alone; less than there are.
            data: ``shard_bytes`` of the group, read-only, the skipped blocks' bytes among them.
        """
