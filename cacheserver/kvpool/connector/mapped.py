# SPDX-License-Identifier: Apache-2.0
"""The engine's cache as movers map it: the client's ``RingPort`` of mode mapped."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from kvpool.connector.ring import JoinedEngineRing
from kvpool.model.errors import ServerUnavailable
from kvpool.model.identity import Mode
from kvpool.transfer.lanes import RingRetiredError
from kvpool.transfer.mapped import EngineCache, MappedJob, MappedMover
from kvpool.transfer.mover.messages import Direction, Join
from kvpool.transfer.plan import parts_of
from kvpool.transfer.planes import Layout, LayoutError
from kvpool.wire.basics import REASON_CHARS
from kvpool.wire.messages import CacheFacts, Register

__all__ = ["FittedCache", "MappedOffer"]

_EXPORT_S: Final = 30.0
"""More than a mover takes to map a cache and to compile its kernel."""


class FittedCache(EngineCache, Protocol):
    """An engine's cache whose chunks can be given another size."""

    def fit(self, blocks_per_chunk: Sequence[int]) -> None:
        """Learn how many blocks a chunk of each group has; while no mover is joined."""


class MappedOffer:
    """See the module."""

    mode = Mode.MAPPED

    def __init__(self, cache: FittedCache, layouts: Sequence[Layout], facts: CacheFacts, why_no_ring: str) -> None:
        """Offer *cache*.

        Args:
            cache: the engine's.
            layouts: those of its groups.
            facts: its device, and the ring that a mover is to allocate there.
            why_no_ring: why it is not a ring that is offered, for people; may be empty.
        """
        self._cache, self._layouts, self._facts, self._why_no_ring = cache, layouts, facts, why_no_ring
        self._fitted: tuple[int, ...] = ()
        self._joined: JoinedEngineRing | None = None

    def fit(self, blocks_per_chunk: Sequence[int]) -> None:
        """Learn how many blocks a chunk of each group has; waits for the moves of a former session.

        Raises:
            LayoutError: chunks cannot go through a mover's slots.
        """
        if tuple(blocks_per_chunk) != self._fitted:
            if self._joined is not None:
                self._joined.close()
            for layout, whole in zip(self._layouts, blocks_per_chunk, strict=True):
                parts_of(layout, whole, self._facts.slot_bytes)
            self._cache.fit(blocks_per_chunk)
            self._fitted = tuple(blocks_per_chunk)

    def offer(self, base: Register) -> Register:
        """See RingPort."""
        self._facts = replace(self._facts, generation=self._facts.generation + 1)
        return replace(base, cache=self._facts, no_ring=self._why_no_ring[:REASON_CHARS])

    def join(self, address: str, secret: bytes, ends_s: float, retired: Callable[[], None]) -> JoinedEngineRing:
        """See RingPort; beside that time, the mover has half a minute to map the cache."""
        joins = [Join(secret=secret, direction=d, generation=self._facts.generation) for d in Direction]
        try:
            mover = MappedMover(self._cache, address, joins, ends_s + _EXPORT_S, retired)
        except (RingRetiredError, LayoutError) as e:
            raise ServerUnavailable(str(e)) from e
        self._joined = JoinedEngineRing(mover, self._layouts, MappedJob)
        return self._joined
