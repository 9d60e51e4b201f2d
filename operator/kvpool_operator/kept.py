# SPDX-License-Identifier: Apache-2.0
"""Pure: what one pass read of a pool that the next one need not read again.

Watches say which part changed, and everything is read anew after a while whatever they say. What is in motion is never
kept: servers that are not all ready and updated, clients that are not all wired.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from typing import Final

from kvpool_operator.desired import Facts
from kvpool_operator.observed import ClientPod, DaemonSetState, ServerPod
from kvpool_operator.spec import Pool

__all__ = ["EVERYTHING", "Kept", "Part"]


class Part(Flag):
    """What is read of a pool besides the pool itself."""

    CHILDREN = auto()
    """Metadata of all that it owns."""
    SERVERS = auto()
    """Its server pods, and what their controller says."""
    CLIENTS = auto()
    """Pods that opted in."""


EVERYTHING: Final = Part.CHILDREN | Part.SERVERS | Part.CLIENTS


@dataclass(slots=True)
class Kept:
    """What is known of one pool. One event loop; one pass at a time.

    Args:
        keep_s: time after which a part is read again though nothing was seen of it.
    """

    keep_s: float
    facts: Facts | None = None
    """Those by which the children were last found to be right; None if they are not."""
    state: DaemonSetState | None = None
    servers: tuple[ServerPod, ...] = ()
    clients: tuple[ClientPod, ...] = ()
    _stale: Part = EVERYTHING
    """Changed since the last pass began."""
    _unread: Part = EVERYTHING
    """What the last pass should have read and has not."""
    _pool: Pool | None = None
    _read_s: dict[Part, float] = field(default_factory=dict)

    def changed(self, part: Part) -> None:
        """Something of *part* changed, or may have."""
        self._stale |= part

    @property
    def unread(self) -> Part:
        """What the pass under way has yet to read."""
        return self._unread

    def need(self, part: Part) -> None:
        """The pass under way has to read *part*, too."""
        self._unread |= part

    def begin(self, pool: Pool, now_s: float) -> Part:
        """Say what a pass over *pool* that begins now has to read; what changes from now on is for the next one."""
        self._unread |= self._stale | (EVERYTHING if pool != self._pool else Part(0)) | self._in_motion()
        for part in EVERYTHING:
            if now_s - self._read_s.get(part, float("-inf")) >= self.keep_s:
                self._unread |= part
        self._stale, self._pool = Part(0), pool
        return self._unread

    def read(self, part: Part, now_s: float) -> None:
        """*part* was read whole, by a pass that began at *now_s*; what a pass that failed left out stays to be read."""
        self._unread &= ~part
        for each in part:
            self._read_s[each] = now_s

    def servers_at(self, now_s: float) -> tuple[ServerPod, ...]:
        """The servers as they are *now_s* if nothing happened to them since they were read."""
        since_s = now_s - self._read_s[Part.SERVERS]
        return tuple(replace(p, state_for_s=p.state_for_s + since_s) for p in self.servers) if since_s else self.servers

    def _in_motion(self) -> Part:
        moving = Part(0) if self.facts is not None else Part.CHILDREN
        if self.state is None or not _at_rest(self.state, self.servers):
            moving |= Part.SERVERS
        if not all(c.wired and not c.deleting for c in self.clients):
            moving |= Part.CLIENTS
        return moving


def _at_rest(state: DaemonSetState, servers: Iterable[ServerPod]) -> bool:
    """True if every node has a server that is ready and of the newest revision, and nobody is about to change that."""
    found = tuple(servers)
    good = all(p.reachable and state.is_served_by(p) for p in found)
    return state.settled and len(found) == state.desired and good
