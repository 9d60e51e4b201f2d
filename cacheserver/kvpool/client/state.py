# SPDX-License-Identifier: Apache-2.0
"""How a client stands with its server."""

from dataclasses import dataclass

from kvpool.model.identity import Mode
from kvpool.model.reasons import UncachedReason
from kvpool.wire.messages import Welcome

__all__ = ["LinkState"]


@dataclass(frozen=True, slots=True)
class LinkState:
    """One state of a Link; it starts as uncached, never healthy by default."""

    healthy: bool
    reason: UncachedReason | None
    """Why the engine runs uncached; None when healthy."""

    detail: str = ""
    """The same for people."""

    epoch: int = 0
    """Grows with each session; what was handed out in one session is void in every other."""

    boot_id: bytes = b""
    welcome: Welcome | None = None
    """The server's last Welcome; there before the link is healthy, since a layout may need the chunk's tokens."""

    mode: Mode | None = None
    """How bytes move; None before registration."""
