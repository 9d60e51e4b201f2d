# SPDX-License-Identifier: Apache-2.0
"""Checksums of chunks that go through the ring: made from the arena after the copy, verified there before it.

Those of stores are made by a thread of their own while other slots are copied. It falls behind by a few chunks at most:
then the store waits, so that the end of a store, too, is never far behind its last copy.
"""

import queue
from collections.abc import Callable
from typing import Final

from kvpool.model.checksum import checksum
from kvpool.transfer.mover.grants import Grants, Place
from kvpool.transfer.mover.memory import Memory
from kvpool.transfer.mover.messages import Move, Revoked

__all__ = ["Checks"]

_BEHIND: Final = 4


class Checks:
    """The checksums of one mover.

    Args:
        grants: what is to be checked.
        memory: the arena.
        revoked: called when the last checksum of a revoked grant is made.
    """

    def __init__(self, grants: Grants, memory: Memory, revoked: Callable[[Revoked], None]) -> None:
        self._grants, self._memory, self._revoked = grants, memory, revoked
        self._due: queue.Queue[tuple[bytes, int, Place]] = queue.Queue(_BEHIND)

    def run(self) -> None:
        """Make checksums for ever. A thread of its own.

        Raises:
            UnknownMemoryError: the server granted what it did not give.
        """
        while True:
            grant, chunk, place = self._due.get()
            kind = self._grants.kind(grant, chunk)
            self._grants.made(grant, chunk, checksum(self._memory.bytes_at(*place), kind))
            if (ended := self._grants.end(grant)) is not None:
                self._revoked(ended)

    def arrived(self, move: Move) -> None:
        """Let the checksums be made of chunks that a move of a store made whole; waits while too many are due."""
        for chunk, place in self._grants.arrived(move):
            self._due.put((move.grant, chunk, place))

    def wrong(self, move: Move) -> tuple[int, ...]:
        """Verify the chunks of a load's move, each once; returns those that are not what was stored.

        Raises:
            UnknownMemoryError: the server granted what it did not give.
        """
        for chunk, place, expected in self._grants.unverified(move):
            found = checksum(self._memory.bytes_at(*place), self._grants.kind(move.grant, chunk))
            self._grants.judge(move.grant, chunk, good=found == expected)
        return self._grants.wrong(move)
