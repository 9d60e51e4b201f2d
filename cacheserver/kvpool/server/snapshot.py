# SPDX-License-Identifier: Apache-2.0
"""What the loop publishes for other threads: immutable, replaced as a whole, never updated in place."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ServerSnapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSnapshot:
    """The server at one moment; published by the loop at least once a second. Names no client."""

    server_id: str
    server_version: str
    boot_id: str
    """Hex of the id in every reply envelope."""

    endpoints: tuple[str, ...]
    """Addresses that clients connect to, as bound (a port 0 is resolved)."""

    ready: bool
    """True when new work is taken: after recovery, until the drain begins, while every thread does its work."""

    reason: str
    """Why it is not ready, for people; empty if it is."""

    draining: bool
    gpus: int | None
    """GPUs that are visible here; None if nobody looks for them, or none has been looked for yet."""

    gpu_reason: str
    """NoGPUVisible and the like, see ``kvpool.server.gpus``; empty if all is well or nobody looks."""

    movers: Mapping[str, int]
    """Clients whose chunks go through a ring now, by the UUID of its device."""

    chunk_tokens: int
    l1_bytes: int
    """What may hold chunks now."""

    l1_asked_bytes: int
    """What the configuration asks for; ``l1_wanted_bytes`` is that in whole segments, if there is room."""

    l1_wanted_bytes: int
    """What ``l1_bytes`` is on its way to."""

    l1_mapped_bytes: int
    """Not used any more, and taken until clients let go of it."""

    l1_used_bytes: int
    l1_pinned_bytes: int
    chunks: int
    clients: int
    sessions: int
    leases: int
    oldest_lease_s: float
    recovered_chunks: int
    """Chunks that were adopted from a former server at start."""

    config_refused: str
    """Why a part of the changed configuration file is not followed; empty if nothing is refused."""

    live_digest: str
    """Name of the settings that count without a restart, see ``kvpool.config.live_digest``."""

    restart_needed: tuple[str, ...]
    """Fields of the changed file that count from the next start on."""

    uptime_s: float
    published_at_s: float
    """Monotonic clock; an old snapshot means a loop that stands still."""

    series: Mapping[str, float]
    """Every series of the metrics catalogue by its key."""
