# SPDX-License-Identifier: Apache-2.0
"""Pure: whether servers have the L1 that the pool asks for; they take another size while they run."""

from kvpool_operator.observed import Observed, ServerStats
from kvpool_operator.spec.pool import Pool
from kvpool_operator.spec.quantity import binary
from kvpool_operator.verdict import Finding

__all__ = ["l1_resized"]


def l1_resized(pool: Pool, seen: Observed) -> Finding:
    """The condition L1Resized."""
    told = [s for s in seen.stats if s.asked_bytes is not None]
    if not told:
        return Finding("Unknown", "NotReported", "no server has said yet how large its L1 is")
    if refusing := sorted((s.node, s.refused) for s in told if s.refused):
        node, why = refusing[0]
        return Finding("False", "Refused", f"{len(refusing)} servers do not follow the spec, first {node}: {why}")
    if pending := sorted(s.node for s in told if not _there(s, int(pool.spec.l1.size))):
        return Finding("False", "Resizing", f"{len(pending)} of {len(told)} servers are on the way, first {pending[0]}")
    mapped_bytes = sum(s.mapped_bytes for s in told)
    rest = f"; {binary(mapped_bytes)} stay taken until engines that mapped them end" if mapped_bytes else ""
    return Finding("True", "AsAsked", f"{len(told)} servers have the L1 that the spec asks for{rest}")


def _there(server: ServerStats, size_bytes: int) -> bool:
    return server.asked_bytes == size_bytes and server.capacity_bytes == server.wanted_bytes
