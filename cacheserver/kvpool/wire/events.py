# SPDX-License-Identifier: Apache-2.0
"""Cache events: what came and went since the last question."""

from kvpool.wire.basics import Count, Reply, Request

__all__ = ["Events", "Subscribe"]


class Events(Reply, frozen=True, kw_only=True, tag="events"):
    """Answer to Subscribe. Raw frames: u1 a chunk (1: readable now, 0: gone), then digests (32 bytes each), in order.

    Sequence numbers belong to one run of the server: the boot id in the envelope says which.
    """

    sequence: Count
    """To be asked after next."""

    snapshot: bool = False
    """What was told before is void: this is the first page of all that is there."""

    more: bool = False
    """There is more to be had at once."""


class Subscribe(Request[Events], frozen=True, kw_only=True, tag="subscribe"):
    """Asks what came and went in the caller's namespace after an answer with this sequence number; 0 begins anew."""

    after: Count = 0
