# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the server. Thread: the loop's; a lane only reads ``Call.ended``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvpool.model.identity import ClientKind, Mode
from kvpool.server.sockets import Peer, Unread
from kvpool.wire.messages import Reply

__all__ = ["UNKNOWN_TAG", "Answer", "Buffer", "Call", "Client"]

Buffer = bytes | bytearray | memoryview

UNKNOWN_TAG: Final = "unknown"
"""Tag of a request that could not be read."""


class Answer(NamedTuple):
    """What a handler returns when it is done."""

    reply: Reply
    frames: Sequence[Buffer] = ()
    large: Buffer | None = None
    """A last frame that is sent without a copy; it belongs to nobody else and does not change any more."""


@dataclass(slots=True, eq=False)
class Client:
    """One client that said Hello."""

    client_id: bytes
    kind: ClientKind
    tenant: str
    label: str
    ticket: bytes
    peer: Peer
    """Its control connection."""

    seen_s: float
    """When its last message came."""

    expires_s: float | None
    """When its identity must have been renewed."""

    namespace: str | None = None
    """The pod's namespace, as its credential shows it; None if that does not say."""

    mode: Mode | None = None
    """How its bytes move; None until it registers."""

    mode_reason: str = ""
    """Why by that mode, for people."""

    watched: bool = False
    """True while a process handle tells whether it lives: then silence proves nothing."""

    lane: int = 0
    bulk: set[Peer] = field(default_factory=set)
    """Its bulk connections."""

    open: "set[Call]" = field(default_factory=set)
    """Its requests that wait for something."""

    copies: int = 0
    """Bulk frames of it that a lane has."""

    copied_bytes: int = 0
    """Bytes of those."""

    unread: list[Unread] = field(default_factory=list)
    """Large replies to it that may still wait in this process."""


class Call:
    """One request, from its arrival to its only answer."""

    __slots__ = ("client", "deadline_s", "ended", "frames", "number", "peer", "received_s", "tag")

    def __init__(self, peer: Peer, received_s: float) -> None:
        self.peer = peer
        self.received_s = received_s
        self.deadline_s = received_s
        self.number = 0
        self.tag = UNKNOWN_TAG
        self.client: Client | None = None
        self.frames: Sequence[memoryview] = ()
        self.ended = False

    @property
    def owner(self) -> Client:
        """The client; there is one in every handler whose route needs a Hello."""
        assert self.client is not None
        return self.client
