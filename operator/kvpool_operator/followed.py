# SPDX-License-Identifier: Apache-2.0
"""Pure: whether servers have what the pool asks for and they take while they run: the size of L1, live settings."""

from collections.abc import Mapping

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
    if refusing := {s.node: s.refused for s in told if s.refused}:
        return _refused(refusing)
    if pending := sorted(s.node for s in told if not _there(s, int(pool.spec.l1.size))):
        return Finding("False", "Resizing", f"{len(pending)} of {len(told)} servers are on the way, first {pending[0]}")
    mapped_bytes = sum(s.mapped_bytes for s in told)
    rest = f"; {binary(mapped_bytes)} stay taken until engines that mapped them end" if mapped_bytes else ""
    return Finding("True", "AsAsked", f"{len(told)} servers have the L1 that the spec asks for{rest}")


def settings_followed(seen: Observed, before: str) -> Finding:
    """The condition SettingsFollowed.

    Whoever did not answer for once, or is of another version, which names settings otherwise, is not judged; but it
    takes a word from all of them until what was false or unknown *before* is true.
    """
    told = [s for s in seen.stats if s.live_digest and s.version == __version__]
    if not told:
        return Finding("Unknown", "NotReported", "no server of the operator's version has said which settings it has")
    behind = {s.node: s.refused for s in told if s.live_digest != seen.live_digest}
    if refusing := {node: why for node, why in behind.items() if why}:
        return _refused(refusing)
    asked = {s.node for s in seen.servers if s.ready and s.reachable and not s.deleting} | {s.node for s in told}
    follow = {s.node for s in told} - behind.keys()
    if pending := sorted(behind if before == "True" else asked - follow):
        text = f"{len(pending)} of {len(asked)} servers have former settings or have not told, first {pending[0]}"
        known = behind or before == "False"
        return Finding("False", "Spreading", text) if known else Finding("Unknown", "NotReported", text)
    return Finding("True", "ByAllServers", f"{len(follow)} servers admit, share and log as the spec says")


def _refused(why: Mapping[str, str]) -> Finding:
    """Servers that say by their nodes why they do not follow."""
    node = min(why)
    return Finding("False", "Refused", f"{len(why)} servers do not follow the spec, first {node}: {why[node]}")


def _there(server: ServerStats, size_bytes: int) -> bool:
    return server.asked_bytes == size_bytes and server.capacity_bytes == server.wanted_bytes
