# SPDX-License-Identifier: Apache-2.0
"""One interface over the ways that bytes move: a Writer for one store, a Reader for one load.

Both are used by one transfer thread. What decides is the server's word: a store goes the way that was agreed at
registration, a chunk is read in place or streamed as PrepareRetrieve says of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final, Protocol, TypeVar

import numpy as np

from kvpool.client.call import Call, Frame
from kvpool.client.link import Link
from kvpool.model.errors import Malformed
from kvpool.wire.messages import Limits, Reply, Request

__all__ = ["Errand", "Fill", "Reader", "Use", "Wanted", "Writer", "only"]

R = TypeVar("R", bound=Reply)

_CONCLUDE_S: Final = 1.0
_CONCLUDE_SHARE: Final = 0.25

Fill = Callable[[memoryview], None]
"""Writes one chunk's bytes into the view that it is given."""

Use = Callable[[int, memoryview], None]
"""Takes one chunk's number and bytes; the view is valid during the call alone."""


@dataclass(frozen=True, slots=True)
class Errand:
    """One job's way to the server: the session that it began in, and when it has to end."""

    link: Link
    epoch: int
    limits: Limits
    ends_s: float
    moving: bool = False
    """True if the last request may be sent while a mover is still at the bytes."""

    def left_s(self) -> float:
        """Seconds that the job still has."""
        return max(0.0, self.ends_s - monotonic())

    def ask(self, request: Request[R], frames: Sequence[Frame] = (), *, bulk: bool = False) -> Call[R]:
        """Send a request of this job; it ends with the job's time, and fails in any other session."""
        return self.link.submit(request, frames, deadline_s=self.left_s(), bulk=bulk, epoch=self.epoch)

    def conclude(self, request: Request[R], frames: Sequence[Frame]) -> Call[R]:
        """Send a job's last request, which gives back what it holds; worth sending even when its time is up."""
        return self.link.submit(request, frames, deadline_s=max(self.left_s(), _CONCLUDE_S), epoch=self.epoch)

    def copying(self) -> "Errand":
        """Return the same errand with less time: the last request needs some of it."""
        return replace(self, ends_s=self.ends_s - min(_CONCLUDE_S, _CONCLUDE_SHARE * self.left_s()))


@dataclass(frozen=True, slots=True)
class Wanted:
    """One chunk to be read."""

    chunk: int
    """Its number in the job."""

    row: np.void
    """Its ``PLACEMENT``."""


class Writer(Protocol):
    """Brings the chunks of one store to their slots."""

    def put(self, chunk: int, row: np.void, fill: Fill) -> None:
        """Let *fill* make the bytes of one chunk and send them on their way, which may not be over yet.

        Raises:
            CacheError: the bytes cannot get there.
        """

    def finish(self) -> dict[int, bytes]:
        """Wait until all is there.

        Returns:
            The checksums of the chunks that got there, made as ``kvpool.model.checksum.PREFERRED``; nothing of any
            other chunk may be committed.
        """


class Reader(Protocol):
    """Brings the chunks of one load from their slots."""

    def each(self, wanted: Sequence[Wanted], use: Use) -> None:
        """Call *use* once for each chunk whose bytes could be had; the others are lost. Raises no CacheError."""


def only(frames: Sequence[Frame]) -> Frame:
    """Return the one raw frame of a reply.

    Raises:
        Malformed: there is another number of them.
    """
    if len(frames) != 1:
        raise Malformed(f"{len(frames)} raw frames instead of one")
    return frames[0]
