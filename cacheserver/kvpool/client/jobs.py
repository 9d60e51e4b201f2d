# SPDX-License-Identifier: Apache-2.0
"""What the connector asks of the adapters and what it gets back; plain values."""

import threading
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.model.keys import DIGEST_BYTES

__all__ = ["Answer", "Finished", "LoadJob", "Moment", "StoreJob"]


class Moment(Protocol):
    """A point in the order of what an engine's device does."""

    @property
    def event(self) -> int:
        """The device's event, for what is put into its streams."""

    def wait(self) -> None:
        """Wait until the device is there."""


@dataclass(slots=True, kw_only=True)
class StoreJob:
    """One request's chunks [first, first + n) of one group and shard, to be kept."""

    request_id: str
    group: int
    shard: int
    first: int
    parent: bytes
    """Digest of chunk first - 1; empty when first is 0."""

    digests: bytes
    """32 bytes a chunk."""

    block_ids: NDArray[np.int64]
    """Shape (chunks, blocks per chunk), in token order; NOWHERE where there is no block."""

    ready: threading.Event = field(default_factory=threading.Event)
    """Set by the engine's side once the blocks' contents are final; no gather begins before it."""

    after: Moment | None = None
    """What on the engine's device the gathers must follow; set before *ready*. None: nothing is under way there."""

    gathered: threading.Event = field(default_factory=threading.Event)
    """Set once the job reads no block any more, whatever became of it."""

    @property
    def chunks(self) -> int:
        """How many chunks the job has."""
        return len(self.digests) // DIGEST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """Chunks [first, end) of a lookup, for one group and shard, to be written into blocks."""

    request_id: str
    lookup_id: bytes
    group: int
    shard: int
    first: int
    end: int
    block_ids: NDArray[np.int64]
    """Shape (end - first, blocks per chunk), in token order."""

    after: Moment | None = None
    """What on the engine's device the scatters must follow: the last step that may still use the blocks."""

    skip_blocks: int = 0
    """Blocks at the start of the range that already hold valid data: never written, never reported as bad."""

    @property
    def chunks(self) -> int:
        """How many chunks the job has."""
        return self.end - self.first

    def skipped(self, chunk: int) -> int:
        """How many blocks of the job's *chunk*-th chunk are left alone."""
        blocks = int(self.block_ids.shape[1])
        return max(0, min(blocks, self.skip_blocks - chunk * blocks))


@dataclass(frozen=True, slots=True)
class Finished:
    """What ended since the last poll."""

    stored: frozenset[str]
    """Requests of which no store is left: nothing reads their blocks any more."""

    loaded: dict[str, frozenset[int]]
    """Requests of which no load is left, with the blocks that hold no valid data."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of one lookup."""

    chunks: int
    """Length of the prefix that is pinned for the lookup; 0 for a miss, a missed deadline or no server."""

    lookup_id: bytes = b""
    """What a worker presents to load it; empty when there is nothing to load."""
