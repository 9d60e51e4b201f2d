# SPDX-License-Identifier: Apache-2.0
"""What the two halves of the connector tell each other, as typed values in one small buffer each.

Before the first request every worker tells the scheduler what it caches (``WorkerFacts``, through the engine's worker
handshake). In every step the scheduler tells all workers what to do (``StepPlan``, in the step's connector metadata).
"""

import math
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.model.identity import GroupKind, Namespace
from kvpool.model.layout import PlaneSpec

__all__ = ["GroupFacts", "PlannedLoad", "PlannedStore", "StepPlan", "WorkerFacts", "block_array", "decode", "encode"]

T = TypeVar("T", bound=msgspec.Struct)


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One cache group of a worker."""

    planes: tuple[PlaneSpec, ...]
    block_tokens: int
    kind: GroupKind = GroupKind.FULL
    window_tokens: int = 0
    number: int = 0
    """The engine's number of the group; a pipeline stage may have some of them only."""


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker caches; equal on all ranks but for the shard."""

    refusal: str = ""
    """Why this engine cannot be cached, in words; everything else is unset then."""

    namespace: Namespace | None = None
    """Without the layout's fingerprint, which needs the server's chunk size."""

    groups: tuple[GroupFacts, ...] = ()
    hash_tokens: int = 0
    """Tokens that one of the engine's own block hashes covers; 0 if those cannot be used."""

    stage: int = 0
    """Pipeline stage: each has a namespace of its own."""

    stages: int = 1
    shard: int = 0
    readers: int = 1
    """Ranks at the same server that each load the same shard."""

    writer: bool = True
    """False on ranks that hold a copy of what another rank at the same server stores."""

    node: str = ""
    """Identity of the machine."""

    server: str = ""
    """Address of its server. Ranks of one engine may use several servers."""

    @property
    def block_tokens(self) -> int:
        """Tokens that every group has whole blocks for: hits and chunks are multiples of it."""
        return math.lcm(*(group.block_tokens for group in self.groups)) if self.groups else 0

    @property
    def by_block(self) -> bool:
        """True if a failed load can name blocks: the engine takes names only where one group holds a whole prefix."""
        return [group.kind for group in self.groups] == [GroupKind.FULL]


class PlannedLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Chunks [first, end) of a lookup, to be written into blocks of one group."""

    request_id: str
    lookup_id: bytes
    first: int
    end: int
    blocks: bytes
    """Block ids (little-endian int64), ``end - first`` chunks of them."""

    skip_blocks: int
    group: int = 0
    """The engine's number of it."""


class PlannedStore(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Chunks from *first* on of one group, to be kept once this step has run."""

    request_id: str
    first: int
    parent: bytes
    digests: bytes
    blocks: bytes
    """Block ids (little-endian int64, NOWHERE where there is none), as many chunks of them as there are digests."""

    group: int = 0
    """The engine's number of it."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step's work for every worker."""

    chunk_tokens: int = 0
    """Size of the chunks that loads and stores speak of."""

    loads: tuple[PlannedLoad, ...] = ()
    stores: tuple[PlannedStore, ...] = ()
    preempted: tuple[str, ...] = ()
    """Requests whose blocks are taken away in this step: no gather may read them any more when it begins."""

    released: tuple[str, ...] = ()
    """Finished requests whose blocks the engine holds until each worker said that no store reads them."""

    idle: bool = False
    """True if the step runs no model: whoever waits for the cache may wait a moment instead of spinning."""

    asking: bool = False
    """True if the step is idle and the scheduler waits for the answer to a lookup."""

    off: bool = False
    """The scheduler's half has failed: all stores end before this step begins."""


def encode(value: msgspec.Struct) -> bytes:
    """Return *value* as bytes; a plan without work is empty."""
    return b"" if value == StepPlan() else msgspec.msgpack.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """Read what ``encode`` made.

    Raises:
        msgspec.DecodeError: the bytes are something else.
    """
    return msgspec.msgpack.decode(data, type=kind) if data else kind()


def block_array(blocks: bytes, chunks: int) -> NDArray[np.int64]:
    """Return block ids as (chunks, blocks per chunk)."""
    array: NDArray[Any] = np.frombuffer(blocks, dtype="<i8")
    return array.reshape(chunks, -1)
