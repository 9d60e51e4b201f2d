# SPDX-License-Identifier: Apache-2.0
"""Pure: the list of a pool's servers for those to whom no name tells it, and when it is written.

Servers and engines mount it, so each change reaches every node of the pool. It follows a rollout once, at its end,
or from time to time if that takes long; a pool whose pods stay has nothing to write.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvpool.model.whereabouts import bracketed, rendered
from kvpool_operator.observed import DaemonSetState, ServerPod

__all__ = ["Whereabouts", "complete", "listed"]

_LONGEST_S: Final = 600.0
"""So long a list may be behind while servers come and go."""
_MOST_BYTES: Final = 512 << 10
"""Half of what a ConfigMap holds: about ten thousand servers."""


@dataclass(slots=True)
class Whereabouts:
    """What one pool's list says, and since when."""

    text: str | None = None
    """None before anybody looked."""
    written_s: float = float("-inf")

    def follow(self, text: str, now_s: float, *, all_there: bool) -> bool:
        """Take in what the list should say; True if it is to be written now.

        Args:
            text: the list as it would be now.
            now_s: monotonic seconds.
            all_there: every server is where it will stay.
        """
        first = self.text is None
        if text == self.text or not (first or all_there or now_s - self.written_s >= _LONGEST_S):
            return False
        self.text, self.written_s = text, now_s
        return not first


def listed(servers: Iterable[ServerPod], port: int) -> str:
    """The list of *servers*: those that have an address and stay."""
    text = rendered({s.node: f"tcp://{bracketed(s.ip)}:{port}" for s in servers if s.ip and not s.deleting})
    return text if len(text) <= _MOST_BYTES else text[: text.rindex("\n", 0, _MOST_BYTES) + 1]


def complete(state: DaemonSetState | None, servers: Iterable[ServerPod]) -> bool:
    """True if every server that is wanted is there, made from the newest template and ready."""
    if state is None or not state.settled:
        return False
    return sum(state.is_served_by(s) for s in servers) == state.desired
