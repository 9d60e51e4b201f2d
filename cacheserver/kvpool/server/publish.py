# SPDX-License-Identifier: Apache-2.0
"""Puts together what the server publishes about itself. Thread: the loop's."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvpool._version import __version__
from kvpool.config import live_digest
from kvpool.engine.outcomes import EngineNumbers
from kvpool.metrics.catalogue import series_key
from kvpool.model.identity import ClientKind, Mode
from kvpool.server.gpus import GpuSight
from kvpool.server.live import LiveState
from kvpool.server.parts import Parts
from kvpool.server.snapshot import ServerSnapshot

__all__ = ["Facts", "Publisher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What does not change while the server runs."""

    server_id: str
    boot_id: bytes
    endpoints: tuple[str, ...]
    recovered_chunks: int
    started_s: float
    """Monotonic."""


_KINDS: Final = {kind: series_key("kvpool_clients", kind=kind.value) for kind in ClientKind}
_MODES: Final = {mode: series_key("kvpool_client_modes", mode=mode.value) for mode in Mode}


class Publisher:
    """Makes snapshots.

    Args:
        parts: the server.
        facts: see there.
        trouble: why new work is not taken; empty if it is.
        draining: whether the server shuts down.
        sight: which GPUs are seen.
    """

    def __init__(
        self,
        parts: Parts,
        facts: Facts,
        trouble: Callable[[], str],
        draining: Callable[[], bool],
        sight: Callable[[], GpuSight],
    ) -> None:
        self._sight = sight
        self.live: Callable[[], LiveState] = LiveState
        """How the server stands to the file that it was configured from."""
        self._first_digest = live_digest(parts.config)
        self._parts = parts
        self._facts = facts
        self._trouble = trouble
        self._draining = draining
        parts.numbers.put(series_key("kvpool_build_info", version=__version__), 1)

    def snapshot(self) -> ServerSnapshot:
        """Return the server as it is now."""
        now_s = self._parts.clock()
        engine = self._parts.engine.numbers()
        draining, sight, live = self._draining(), self._sight(), self.live()
        reason = "draining" if draining else self._trouble() or sight.trouble
        uptime_s = now_s - self._facts.started_s
        self._gauges(engine, uptime_s, ready=not reason, draining=draining)
        self._count_clients()
        return ServerSnapshot(
            server_id=self._facts.server_id,
            server_version=__version__,
            boot_id=self._facts.boot_id.hex(),
            endpoints=self._facts.endpoints,
            ready=not reason,
            reason=reason,
            draining=draining,
            gpus=sight.count,
            gpu_reason=sight.reason,
            movers=Counter(m.gpu for m in self._parts.rings.numbers(now_s) if m.joined),
            chunk_tokens=self._parts.config.chunk_tokens,
            l1_bytes=engine.l1_bytes,
            l1_asked_bytes=live.asked_bytes or self._parts.config.l1.size_bytes,
            l1_wanted_bytes=engine.l1_wanted_bytes,
            l1_mapped_bytes=engine.l1_mapped_bytes,
            l1_used_bytes=engine.used_bytes,
            l1_pinned_bytes=engine.pinned_bytes,
            chunks=engine.chunks,
            clients=len(self._parts.connections),
            sessions=engine.sessions,
            leases=engine.leases,
            oldest_lease_s=engine.oldest_lease_s,
            recovered_chunks=self._facts.recovered_chunks,
            uptime_s=uptime_s,
            published_at_s=now_s,
            config_refused=live.refused,
            live_digest=live.digest or self._first_digest,
            restart_needed=live.restart,
            series=self._parts.numbers.published(),
        )

    def _gauges(self, engine: EngineNumbers, uptime_s: float, *, ready: bool, draining: bool) -> None:
        values: Mapping[str, float] = {
            "kvpool_l1_bytes": engine.l1_bytes,
            "kvpool_l1_wanted_bytes": engine.l1_wanted_bytes,
            "kvpool_l1_mapped_bytes": engine.l1_mapped_bytes,
            "kvpool_l1_used_bytes": engine.used_bytes,
            "kvpool_l1_pinned_bytes": engine.pinned_bytes,
            "kvpool_quarantined_bytes": engine.quarantined_bytes,
            "kvpool_chunks": engine.chunks,
            "kvpool_sessions": engine.sessions,
            "kvpool_leases": engine.leases,
            "kvpool_oldest_lease_seconds": engine.oldest_lease_s,
            "kvpool_ready": float(ready),
            "kvpool_draining": float(draining),
            "kvpool_uptime_seconds": uptime_s,
            **engine.counters,
        }
        self._parts.numbers.put_all(values)

    def _count_clients(self) -> None:
        counts = dict.fromkeys((*_KINDS.values(), *_MODES.values()), 0.0)
        for client in self._parts.connections:
            counts[_KINDS[client.kind]] += 1
            # A scheduler registers a mode, too, but moves nothing.
            if client.mode is not None and client.kind is ClientKind.WORKER:
                counts[_MODES[client.mode]] += 1
        counts["kvpool_movers"] = len(self._parts.rings)
        self._parts.numbers.put_all(counts)
