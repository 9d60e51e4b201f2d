# SPDX-License-Identifier: Apache-2.0
"""Metrics of the rings of GPU clients."""

from typing import Final

from kvpool.metrics.metric import Kind, Metric

__all__ = ["MOVERS"]

MOVERS: Final = (
    Metric(
        name="kvpool_movers",
        kind=Kind.GAUGE,
        unit="movers",
        help="Mover processes that exist, also those that were ended and are not reaped yet.",
        panel="Clients",
    ),
    Metric(
        name="kvpool_movers_ended_total",
        kind=Kind.COUNTER,
        unit="movers",
        help="Movers that were reaped, whatever ended them.",
        panel="Clients",
    ),
    Metric(
        name="kvpool_ring_checksums_total",
        kind=Kind.COUNTER,
        unit="chunks",
        help="Chunks whose checksum a mover made (store) or verified (load), counted when the store or load ended.",
        panel="Transfers",
        labels=(("direction", ("store", "load")),),
    ),
    Metric(
        name="kvpool_ring_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        help="Bytes that movers copied between rings and slots, counted when the store or load ended.",
        panel="Transfers",
        labels=(("direction", ("store", "load")),),
    ),
)
