# SPDX-License-Identifier: Apache-2.0
"""What a mover needs from a device. The real one is ``mover.device``; tests move bytes between mapped files."""

from typing import Protocol

from kvpool.transfer.mover.messages import Direction

__all__ = ["DeviceFailedError", "MoverDevice"]


class DeviceFailedError(Exception):
    """The device refused or lost something: the mover reports it and ends, whatever else it could still do."""


class MoverDevice(Protocol):
    """A client's ring on a device, and host memory that copies may use.

    One thread for each direction queues copies, another one waits for them; one thread registers. Each calls ``use``
    first. All raise DeviceFailedError.
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
