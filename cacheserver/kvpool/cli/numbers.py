# SPDX-License-Identifier: Apache-2.0
"""A server's statistics as the numbers that people ask for. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvpool.model.identity import ClientKind
from kvpool.wire.messages import Statistics

__all__ = ["Numbers", "by_label", "labels_of", "numbers_of", "total"]

CLIENTS: Final = "kvpool_clients"
LOOKUPS: Final = "kvpool_lookups_total"
LOOKUP_TOKENS: Final = "kvpool_lookup_tokens_total"
HIT_TOKENS: Final = "kvpool_hit_tokens_total"
STORES: Final = "kvpool_store_chunks_total"
LOADS: Final = "kvpool_load_chunks_total"
EVICTED: Final = "kvpool_evicted_chunks_total"
MISMATCHES: Final = "kvpool_checksum_mismatches_total"
ILLEGAL_MOVES: Final = "kvpool_illegal_moves_total"

_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What the verdict and the table are made of; counts are since the server's start."""

    ready: bool
    draining: bool
    clients: int
    """Workers and schedulers; whoever asks for the numbers is not one."""

    chunk_tokens: int
    chunks: int
    lookups: Mapping[str, int] = field(default_factory=dict)
    """Lookups by the reason why their prefix ended."""

    lookup_tokens: int = 0
    hit_tokens: int = 0
    stored: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Chunks that were offered and not kept for want of room, by reason."""

    present: int = 0
    """Chunks that were offered and already there, or on their way from somebody else."""

    evicted: int = 0
    loads: Mapping[str, int] = field(default_factory=dict)
    """Chunks read, by whether the server vouched for them."""

    mismatches: int = 0
    illegal_moves: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Tokens found over tokens asked for; None before the first lookup."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else None


def numbers_of(s: Statistics) -> Numbers:
    """Read the counters of *s* by their names in the metrics catalogue."""
    c = s.counters
    stores = by_label(c, STORES, "disposition")
    clients = by_label(c, CLIENTS, "kind")
    return Numbers(
        ready=s.ready,
        draining=s.draining,
        clients=clients.get(ClientKind.WORKER, 0) + clients.get(ClientKind.SCHEDULER, 0),
        chunk_tokens=s.chunk_tokens,
        chunks=s.chunks,
        lookups=by_label(c, LOOKUPS, "reason"),
        lookup_tokens=total(c, LOOKUP_TOKENS),
        hit_tokens=total(c, HIT_TOKENS),
        stored=stores.pop("stored", 0),
        present=stores.pop("present", 0) + stores.pop("pending", 0),
        skipped=stores,
        loads=by_label(c, LOADS, "result"),
        evicted=total(c, EVICTED),
        mismatches=total(c, MISMATCHES),
        illegal_moves=total(c, ILLEGAL_MOVES),
    )


def total(counters: Mapping[str, float], name: str) -> int:
    """Return the sum of all series of one metric."""
    return int(sum(v for k, v in counters.items() if k.partition("{")[0] == name))


def by_label(counters: Mapping[str, float], name: str, label: str) -> dict[str, int]:
    """Return one metric's values by one label, without the zeros."""
    found: dict[str, int] = {}
    for series, value in counters.items():
        if series.partition("{")[0] == name and value:
            key = labels_of(series).get(label, "")
            found[key] = found.get(key, 0) + int(value)
    return found


def labels_of(series: str) -> dict[str, str]:
    """Return the labels of one series, as it stands on a page of metrics."""
    return dict(_LABEL.findall(series))
