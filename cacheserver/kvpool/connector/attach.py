# SPDX-License-Identifier: Apache-2.0
"""Keeps one half of the connector registered with its server, whatever size of chunks that server has."""

import threading
from dataclasses import dataclass

import msgspec

from kvpool.client.link import Link
from kvpool.client.locate import Clues
from kvpool.client.state import LinkState
from kvpool.config import ClientConfig
from kvpool.connector.groups import blocks_per_chunk
from kvpool.connector.memory import Ring
from kvpool.connector.plan import WorkerFacts
from kvpool.connector.translate import registration
from kvpool.model.identity import ClientKind, Mode
from kvpool.model.reasons import UncachedReason
from kvpool.transfer.planes import LayoutError
from kvpool.wire.basics import REASON_CHARS
from kvpool.wire.messages import Register, Welcome

__all__ = ["Attachment", "Session"]


@dataclass(frozen=True, slots=True)
class Session:
    """One session with a server, as the engine's thread sees it."""

    epoch: int
    chunk_tokens: int
    lookup_lease_s: float


class Attachment:
    """A link and what it registers. Made idle; ``begin`` starts it once it is known what the engine caches.

    ``session`` may be called from any thread.
    """

    def __init__(
        self,
        config: ClientConfig,
        kind: ClientKind,
        ring: Ring | None = None,
        clues: Clues | None = None,
        why_no_ring: str = "",
    ) -> None:
        self._ring, self._why_no_ring = ring, why_no_ring
        self.link = Link(config, kind, clues=clues, on_state=self._on_state, accept=self._accept)
        self._told = threading.Event()
        self._modes = config.modes if kind is ClientKind.WORKER else ()
        self._facts: WorkerFacts | None = None
        self._shards: tuple[int, ...] = ()

    def begin(self, facts: WorkerFacts, shards: tuple[int, ...]) -> None:
        """Connect, and register *facts* for *shards* with every server that answers; once."""
        self._facts, self._shards = facts, shards
        if self._ring is not None:
            self._ring.keeper.begin(self.link)
        self.link.start()

    def wait_verdict(self, timeout_s: float) -> None:
        """Wait until it is known whether there is a server; for the engine's start, whose first request may hit."""
        self._told.wait(timeout_s)

    def session(self) -> Session | None:
        """Return the session that work can be begun in now; None while the engine runs uncached."""
        state = self.link.state
        if not state.healthy or state.welcome is None:
            return None
        return Session(state.epoch, state.welcome.chunk_tokens, state.welcome.lookup_lease_s)

    def states(self) -> dict[str, LinkState]:
        """Return how the server stands, by its address."""
        return {self.link.config.server: self.link.state}

    def uncached(self) -> UncachedReason | None:
        """Return why the engine runs uncached; None if it does not."""
        return self.link.state.reason

    def close(self, timeout_s: float) -> None:
        """Say goodbye; waits at most *timeout_s*. Idempotent."""
        self.link.close(timeout_s)

    def _on_state(self, state: LinkState) -> None:
        if state.reason is not UncachedReason.STARTING:
            self._told.set()
        if self._ring is not None:
            self._ring.keeper.on_state(state)

    def _accept(self, welcome: Welcome) -> UncachedReason | None:
        """Fit the registration to the server's chunks; on the link's thread."""
        assert self._facts is not None
        if welcome.chunk_tokens % self._facts.block_tokens:
            return UncachedReason.CHUNK_TOKENS
        modes: tuple[Mode, ...] = self._modes
        wanted = registration(self._facts, welcome.chunk_tokens, self._shards, modes)
        if self._ring is not None:
            self.link.registration = self._with_ring(self._ring, wanted, welcome)
        else:
            self.link.registration = _without_ring(wanted, self._why_no_ring)
        return None

    def _with_ring(self, ring: Ring, wanted: Register, welcome: Welcome) -> Register:
        """Offer the ring, if chunks of this size can go through it."""
        assert self._facts is not None
        try:
            ring.offer.fit([blocks_per_chunk(group, welcome.chunk_tokens) for group in self._facts.groups])
        except LayoutError as e:
            ring.keeper.reason = str(e)
            return _without_ring(wanted, str(e))
        return ring.keeper.equip(wanted)


def _without_ring(wanted: Register, reason: str) -> Register:
    return msgspec.structs.replace(wanted, no_ring=reason[:REASON_CHARS])
