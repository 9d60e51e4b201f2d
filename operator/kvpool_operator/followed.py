# SPDX-License-Identifier: Apache-2.0
"""Pure: whether servers have what the pool asks for and they take while they run: the size of L1, live settings."""

from kvpool._version import __version__
from kvpool_operator.observed import Observed, ServerStats
from kvpool_operator.spec.pool import Pool
from kvpool_operator.spec.quantity import binary
from kvpool_operator.verdict import Finding

__all__ = ["l1_resized", "settings_followed"]


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


def settings_followed(seen: Observed) -> Finding:
    """The condition SettingsFollowed. Other versions name settings otherwise, so their servers are not judged."""
    told = [s for s in seen.stats if s.live_digest and s.version == __version__]
    if not told:
        return Finding("Unknown", "NotReported", "no server of the operator's version has said which settings it has")
    behind = sorted((s.node, s.refused) for s in told if s.live_digest != seen.live_digest)
    if refusing := [(node, why) for node, why in behind if why]:
        node, why = refusing[0]
        return Finding("False", "Refused", f"{len(refusing)} servers do not follow the spec, first {node}: {why}")
    if behind:
        text = f"{len(behind)} of {len(told)} servers still have former settings, first {behind[0][0]}"
        return Finding("False", "Spreading", text)
    return Finding("True", "ByAllServers", f"{len(told)} servers admit, share and log as the spec says")


def _there(server: ServerStats, size_bytes: int) -> bool:
    return server.asked_bytes == size_bytes and server.capacity_bytes == server.wanted_bytes
