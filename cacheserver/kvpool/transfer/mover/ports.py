# SPDX-License-Identifier: Apache-2.0
"""What a mover needs from a device. The real one is ``mover.device``; tests move bytes between mapped files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.mover.messages import Direction, Piece
from kvpool.transfer.mover.runs import Costs
from kvpool.transfer.plan import Part
from kvpool.transfer.planes import Layout

__all__ = ["DeviceCopy", "DeviceFailedError", "Gather", "MappedGroup", "MoverDevice"]

DeviceCopy = tuple[int, int, int]
"""Where on the device, host address, length."""


class DeviceFailedError(Exception):
    """The device refused or lost something: the mover reports it and ends, whatever else it could still do."""


@dataclass(frozen=True, slots=True)
class MappedGroup:
    """One group of a client's cache, mapped here."""

    layout: Layout
    addresses: Sequence[int]
    """Where its storages begin."""

    whole: int
    """Blocks of a chunk."""


@dataclass(frozen=True, slots=True)
class Gather:
    """What the mover's kernel moves between the cache and a slot, either way."""

    group: int
    part: Part
    ids: NDArray[np.int64]
    """Of all blocks of the turn's chunks, shape (chunks, blocks per chunk)."""


class MoverDevice(Protocol):
    """A client's ring on a device, and host memory that copies may use.

    One thread for each direction queues copies, another one waits for them; one thread registers. Each calls ``use``
    first. All raise DeviceFailedError.

    In mode mapped the ring is the mover's own, and the cache is mapped, too: the thread of the stores calls ``attach``
    and ``prepare`` before anything is queued.
    """

    def use(self) -> None:
        """Prepare the calling thread."""

    def register(self, address: int, length: int) -> None:
        """Let copies use this host memory."""

    def unregister(self, address: int) -> None:
        """Let them do so no more; none does."""

    def copy(self, direction: Direction, ring_offset: int, address: int, length: int) -> None:
        """Queue a copy between the ring and registered host memory."""

    def mark(self, direction: Direction, slot: int) -> None:
        """Remember for *slot* what has been queued in this direction so far."""

    def wait(self, direction: Direction, slot: int) -> None:
        """Block until all that was queued before the slot's mark is done."""

    def attach(self, pieces: Sequence[tuple[Piece, int]]) -> int:
        """Map one memory of the client's cache; returns its address.

        Args:
            pieces: its pieces in order, each with its descriptor (-1 for one with a handle), which the caller closes.
        """

    def prepare(self, groups: Sequence[MappedGroup]) -> Costs:
        """Make the kernel ready for these groups, and measure. Reads the cache and never writes to it."""

    def by_kernel(self, direction: Direction, slot: int, gather: Gather, copies: Sequence[DeviceCopy]) -> None:
        """Queue a turn through a slot, and mark it.

        Stores: the kernel, then the copies out of the ring (by offset in it). Loads: the copies, then the kernel.
        """

    def by_copies(self, direction: Direction, slot: int, copies: Sequence[DeviceCopy]) -> None:
        """Queue copies between the cache itself (by address) and host memory, and mark them as the slot's."""
