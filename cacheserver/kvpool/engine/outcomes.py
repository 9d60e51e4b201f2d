# SPDX-License-Identifier: Apache-2.0
"""What the engine's verbs answer: plain values that the rim turns into replies, status and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.model.identity import ClientKind, Mode, Role
from kvpool.model.reasons import LookupReason

__all__ = [
    "Access",
    "ChangeBatch",
    "Cleared",
    "ClientNumbers",
    "EngineNumbers",
    "FoundPrefix",
    "ReadPlan",
    "Recovery",
    "ScopeNumbers",
]


class Access(Enum):
    """How a client may map one region."""

    NONE = "none"
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """Where a lookup stands."""

    chunks: int
    """Length of the prefix that is pinned, in chunks."""

    coming: int
    """Chunks right behind it that another client or a tier still brings; 0 means that the answer is final."""

    reason: LookupReason
    """Why the prefix ends there."""


class ReadPlan(NamedTuple):
    """Answer to ``prepare_retrieve``: three arrays, one row a chunk."""

    placements: NDArray[np.void]
    """``PLACEMENT`` rows: IN_PLACE, STREAM, or LOST where the pin is gone."""

    checksums: NDArray[np.void]
    """16 bytes a chunk."""

    kinds: NDArray[np.uint8]
    """``ChecksumKind`` a chunk; 0 where there is none or this load need not verify it."""


class Cleared(NamedTuple):
    """Answer to ``clear``."""

    chunks: int
    kept: int
    """Chunks that stayed because somebody holds them."""


class ChangeBatch(NamedTuple):
    """Answer to ``changes.take``."""

    sequence: int
    """To be asked after next."""

    snapshot: bool
    """True: what was announced before is void, and this is the first page of all that is there."""

    more: bool
    """True: ask again at once."""

    stored: bytes
    """A byte a chunk: 1 it came, 0 it went."""

    digests: bytes
    """32 bytes a chunk, in order."""


class Recovery(NamedTuple):
    """What ``recover`` took over from a former server."""

    chunks: int
    """Chunks that are readable again."""

    quarantined: int
    """Slots that a former writer may still write to."""


@dataclass(frozen=True, slots=True)
class EngineNumbers:
    """Numbers of the whole engine, without any client's name."""

    slots: int
    """Slots that exist now: regions that nobody needed yet have none."""

    slots_used: int
    l1_bytes: int
    """Bytes of the regions that may hold chunks now."""

    l1_wanted_bytes: int
    """What ``l1_bytes`` is on its way to."""

    l1_mapped_bytes: int
    """Bytes of regions that are not used any more, and whose memory goes once clients let go of it."""

    used_bytes: int
    pinned_bytes: int
    """Bytes of the slots that at least one reader pins."""

    quarantined_bytes: int
    """Bytes of unreadable slots that a former writer may still write to."""

    chunks: int
    """Readable pieces: one for each shard and group of a chunk."""

    regions: int
    regions_empty: int
    regions_draining: int
    clients: int
    sessions: int
    leases: int
    """Live lookups and stores."""

    oldest_lease_s: float
    """Age of the oldest live lease; 0 if there is none."""

    counters: Mapping[str, float]
    """Counts since the start, by metric name with labels as in the exposition format; all exist from the start."""


@dataclass(frozen=True, slots=True)
class ClientNumbers:
    """Numbers of one client, for the admin face alone."""

    client_id: bytes
    label: str
    tenant: str
    kind: ClientKind
    role: Role
    mode: Mode | None
    """None until it registers."""

    model: str
    pinned_bytes: int
    """Bytes of the slots that its lookups pin."""

    held_bytes: int
    """Bytes of the slots that it may write to."""

    lookups: int
    stores: int
    idle_s: float
    """Since its last call."""


@dataclass(frozen=True, slots=True)
class ScopeNumbers:
    """What is kept of one model of one tenant, for the admin face alone."""

    tenant: str
    model: str
    chunks: int
    """Pieces (one for each shard and group of a chunk) that are readable or being written."""
