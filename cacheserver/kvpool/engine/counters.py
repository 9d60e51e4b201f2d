# SPDX-License-Identifier: Apache-2.0
"""What the engine counts, by the names under which it is exported; every series exists with 0 from the start."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kvpool.model.reasons import LookupReason
from kvpool.model.slots import Disposition

__all__ = [
    "BEGUN",
    "CHECKSUM_MISMATCHES",
    "CLEARED",
    "EVICTED",
    "EXPIRED_LOOKUPS",
    "EXPIRED_STORES",
    "FETCHED",
    "FETCH_FAILED",
    "HIT_TOKENS",
    "ILLEGAL_MOVES",
    "LOADED",
    "LOADED_BYTES",
    "LOOKUPS",
    "LOOKUP_TOKENS",
    "STORED_BYTES",
    "STORES",
    "STORE_BEGUN",
    "Counters",
]

LOOKUPS: Final = {r: f'kvpool_lookups_total{{reason="{r.value}"}}' for r in LookupReason}
LOOKUP_TOKENS: Final = "kvpool_lookup_tokens_total"
HIT_TOKENS: Final = "kvpool_hit_tokens_total"
_STORES: Final = {
    d: f'kvpool_store_chunks_total{{disposition="{d.name.lower()}"}}'
    for d in Disposition
    if d <= Disposition.PINNED or d in (Disposition.STORED, Disposition.ABANDONED)
}
"""How each chunk of a store ended; together they are all chunks that clients asked to store and that have ended."""

BEGUN: Final = "kvpool_store_begun_chunks_total"
STORES: Final = {
    d: f'kvpool_store_chunks_total{{disposition="{d.name.lower()}"}}'
    for d in (
        Disposition.STORED,
        Disposition.PRESENT,
        Disposition.PENDING,
        Disposition.FULL,
        Disposition.QUOTA,
        Disposition.PINNED,
        Disposition.ABANDONED,
    )
}
STORE_BEGUN: Final = "kvpool_store_begun_chunks_total"
STORED_BYTES: Final = "kvpool_store_bytes_total"
LOADED: Final = {
    d: f'kvpool_load_chunks_total{{result="{d.name.lower()}"}}' for d in (Disposition.VOUCHED, Disposition.LOST)
}
LOADED_BYTES: Final = "kvpool_load_bytes_total"
CHECKSUM_MISMATCHES: Final = "kvpool_checksum_mismatches_total"
EVICTED: Final = "kvpool_evicted_chunks_total"
CLEARED: Final = "kvpool_cleared_chunks_total"
EXPIRED_LOOKUPS: Final = 'kvpool_expired_leases_total{kind="lookup"}'
EXPIRED_STORES: Final = 'kvpool_expired_leases_total{kind="store"}'
FETCHED: Final = 'kvpool_tier_fetches_total{result="hit"}'
FETCH_FAILED: Final = 'kvpool_tier_fetches_total{result="miss"}'
ILLEGAL_MOVES: Final = "kvpool_illegal_moves_total"

_PLAIN: Final = (
    LOOKUP_TOKENS,
    HIT_TOKENS,
    STORE_BEGUN,
    STORED_BYTES,
    LOADED_BYTES,
    CHECKSUM_MISMATCHES,
    EVICTED,
    CLEARED,
    EXPIRED_LOOKUPS,
    EXPIRED_STORES,
    FETCHED,
    FETCH_FAILED,
    ILLEGAL_MOVES,
)


class Counters:
    """Counts since the start."""

    def __init__(self) -> None:
        """Start all series at 0."""
        labelled = (*LOOKUPS.values(), *STORES.values(), *LOADED.values())
        self._values: dict[str, float] = dict.fromkeys((*labelled, *_PLAIN), 0.0)

    def add(self, name: str, amount: float = 1) -> None:
        """Count *amount* more under a declared name."""
        self._values[name] += amount

    def snapshot(self, counted_elsewhere: Mapping[str, float]) -> Mapping[str, float]:
        """Return a copy of all series; those of *counted_elsewhere* in place of ours."""
        return MappingProxyType({**self._values, **counted_elsewhere})
