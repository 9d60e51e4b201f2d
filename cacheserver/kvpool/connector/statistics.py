# SPDX-License-Identifier: Apache-2.0
"""What the connector counts, as data: one table feeds the engine's log line and its Prometheus page.

A payload is ``{"counters": {key: increase}, "gauges": {key: value}}``. Increases are summed over ranks and steps; of
gauges the largest of all ranks counts, so a rank repeats its own until they are 0. A key is one of the table's,
``uncached:HALF:REASON``, or ``server:ADDRESS:STATE``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvpool.model.reasons import UncachedReason

__all__ = [
    "COUNTERS",
    "GAUGES",
    "HALVES",
    "REASONS",
    "SERVER",
    "UNCACHED",
    "UP",
    "Row",
    "Sampler",
    "is_empty",
    "merge",
    "reduce",
    "server_key",
]

Payload = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One metric."""

    name: str
    """As the engine's page shows it, without the suffix that counters get."""

    help: str


COUNTERS: Final[dict[str, Row]] = {
    "lookups": Row("kvpool_lookups", "Lookups whose answer was used to schedule a request."),
    "hits": Row("kvpool_lookup_hits", "Lookups that led to a load."),
    "lookup_tokens": Row("kvpool_lookup_tokens", "Tokens of looked-up requests that the engine did not hold itself."),
    "hit_tokens": Row("kvpool_hit_tokens", "Tokens that loads were planned for."),
    "loads": Row("kvpool_loads", "Loads planned by the scheduler."),
    "loads_not_worth": Row(
        "kvpool_loads_not_worth", "Hits that were computed: their loads were expected to take longer."
    ),
    "stores": Row("kvpool_stores", "Stores planned by the scheduler."),
    "uncacheable_requests": Row("kvpool_uncacheable_requests", "Requests with content that cannot be identified."),
    "failed_loads": Row("kvpool_failed_loads", "Loads that left blocks without valid data, once for each rank."),
    "bad_blocks": Row("kvpool_bad_blocks", "Blocks that were reported as invalid, for each rank."),
    "loaded_bytes": Row("kvpool_loaded_bytes", "Bytes written into blocks by loads that were vouched for."),
    "stored_bytes": Row("kvpool_stored_bytes", "Bytes that stores brought to the server."),
    "stored_chunks": Row("kvpool_stored_chunks", "Chunks that stores brought to the server."),
    "dropped_stores": Row(
        "kvpool_dropped_stores", "Stores of which nothing was kept: late, cancelled, refused or failed."
    ),
    "faults": Row(
        "kvpool_connector_faults", "Failures of the connector's own code; the first one turns the cache off."
    ),
}

GAUGES: Final[dict[str, Row]] = {
    "loads_in_flight": Row("kvpool_loads_in_flight", "Loads that run now."),
    "servers_down": Row("kvpool_servers_down", "Of several servers of one engine, those that cannot be used now."),
}

UNCACHED: Final = Row("kvpool_uncached", "1 for the reason why a half of the connector runs uncached now, else 0.")

SERVER: Final = Row(
    "kvpool_server", "1 for how each server of the engine stands now: up, or the reason why it is not used; else 0."
)

UP: Final = "up"

HALVES: Final = ("scheduler", "worker")

REASONS: Final[tuple[str, ...]] = (*(str(reason) for reason in UncachedReason), "unsupported", "failed")
"""Values of the reason label: the client's own, an engine that is not supported, and a failure of the connector."""


class Sampler:
    """Turns totals into increases, step by step; one for each half of the connector."""

    def __init__(self, half: str, totals: Callable[[], Mapping[str, float]], uncached: Callable[[], str]) -> None:
        """Make it.

        Args:
            half: one of ``HALVES``.
            totals: counters (since the start) and gauges by their key in the table; other keys are left out.
            uncached: why the engine runs uncached; empty if it does not.
        """
        self._half = half
        self._totals = totals
        self._uncached = uncached
        self._before: dict[str, float] = {}
        self._shown: dict[str, float] = {}

    def sample(self) -> Payload:
        """Return what is new since the last call; empty if nothing is."""
        totals = self._totals()
        counters = {k: v - self._before.get(k, 0) for k, v in totals.items() if k in COUNTERS}
        self._before.update({k: totals[k] for k in counters})
        gauges = {k: v for k, v in totals.items() if k in GAUGES or k.startswith("server:")}
        if reason := self._uncached():
            gauges[f"uncached:{self._half}:{reason}"] = 1.0
        gone = dict.fromkeys(self._shown, 0.0)
        before, self._shown = self._shown, {k: v for k, v in gauges.items() if v}
        payload: Payload = {}
        if changed := {k: v for k, v in counters.items() if v}:
            payload["counters"] = changed
        # One half alone tells of servers: what has not changed need not be told in every step.
        known = {k for k in before if k.startswith("server:") and k in self._shown}
        if news := {k: v for k, v in (gone | self._shown).items() if k not in known}:
            payload["gauges"] = news
        return payload


def server_key(address: str, reason: UncachedReason | None) -> str:
    """Return the key of how one server stands."""
    return f"server:{address}:{reason or UP}"


def merge(one: Payload, other: Payload) -> Payload:
    """Add the payload of another rank or step."""
    counters = dict(one.get("counters", {}))
    for key, value in other.get("counters", {}).items():
        counters[key] = counters.get(key, 0) + value
    gauges = dict(one.get("gauges", {}))
    for key, value in other.get("gauges", {}).items():
        gauges[key] = max(gauges.get(key, value), value)
    return {"counters": counters, "gauges": gauges}


def is_empty(payload: Payload) -> bool:
    """True if nothing is in it."""
    return not payload.get("counters") and not payload.get("gauges")


def reduce(payload: Payload) -> dict[str, int | float]:
    """Return the numbers for the engine's log line."""
    return {COUNTERS[key].name: value for key, value in payload.get("counters", {}).items() if key in COUNTERS}
