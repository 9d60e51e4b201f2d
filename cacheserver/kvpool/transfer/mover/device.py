# SPDX-License-Identifier: Apache-2.0
"""A mover's device: the client's ring by its handle, a copy stream and an event a slot for each direction.

In mode mapped the ring is the mover's own, and ``mover.gathering`` has the kernel.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvpool.transfer.cuda import Context, CudaError
from kvpool.transfer.mover.gathering import Gathering
from kvpool.transfer.mover.kernel import MoveKernel
from kvpool.transfer.mover.messages import Direction, Piece, Ring
from kvpool.transfer.mover.ports import DeviceCopy, DeviceFailedError, Gather, MappedGroup
from kvpool.transfer.mover.runs import Costs

__all__ = ["CudaMoverDevice"]


class CudaMoverDevice:
    """Implements ``MoverDevice``. It goes with its process: nothing is given back one by one."""

    def __init__(self, ring: Ring) -> None:
        """Open the ring on its device, or allocate it there if it has no handle.

        Raises:
            DeviceFailedError: the device is not visible, the handle is refused, or memory is short.
        """
        self._ring = ring
        with _failing():
            self._context = Context.of_uuid(ring.device)
            self._context.use()
            self._base = self._context.open(ring.handle) if ring.handle else self._context.allocate(ring.length)
            self._streams = {d: self._context.stream(urgent=False) for d in Direction}
            self._events = {(d, n): self._context.event() for d in Direction for n in range(ring.slots)}

    def use(self) -> None:
        """See MoverDevice."""
        with _failing():
            self._context.use()

    def register(self, address: int, length: int) -> None:
        """See MoverDevice."""
        with _failing():
            self._context.register(address, length)

    def unregister(self, address: int) -> None:
        """See MoverDevice."""
        with _failing():
            self._context.unregister(address)

    def copy(self, direction: Direction, ring_offset: int, address: int, length: int) -> None:
        """See MoverDevice."""
        with _failing():
            self._copy(direction, self._base + ring_offset, address, length)

    def mark(self, direction: Direction, slot: int) -> None:
        """See MoverDevice."""
        with _failing():
            self._context.record(self._events[direction, slot], self._streams[direction])

    def wait(self, direction: Direction, slot: int) -> None:
        """See MoverDevice."""
        with _failing():
            self._context.wait_event(self._events[direction, slot])

    # --- mode mapped -----------------------------------------------------------------------------------------------

    def attach(self, pieces: Sequence[tuple[Piece, int]]) -> int:
        """See MoverDevice."""
        with _failing():
            handle = pieces[0][0].handle
            if handle is not None:
                return self._context.open(handle)
            return self._context.map([(descriptor, piece.length) for piece, descriptor in pieces])

    def prepare(self, groups: Sequence[MappedGroup]) -> Costs:
        """See MoverDevice."""
        with _failing():
            self._gathering = Gathering(self._context, self._ring, self._base, groups, MoveKernel)
            return self._gathering.measure(self._streams[Direction.STORE])

    def by_kernel(self, direction: Direction, slot: int, gather: Gather, copies: Sequence[DeviceCopy]) -> None:
        """See MoverDevice."""
        kernels, stream = self._gathering.stream(direction), self._streams[direction]
        with _failing():
            if direction is Direction.STORE:
                self._gathering.launch(direction, slot, gather)
                self._after(stream, kernels, direction, slot)
            for offset, address, length in copies:
                self._copy(direction, self._base + offset, address, length)
            if direction is Direction.LOAD:
                self._after(kernels, stream, direction, slot)
                self._gathering.launch(direction, slot, gather)
                stream = kernels
            self._context.record(self._events[direction, slot], stream)

    def by_copies(self, direction: Direction, slot: int, copies: Sequence[DeviceCopy]) -> None:
        """See MoverDevice."""
        with _failing():
            for there, address, length in copies:
                self._copy(direction, there, address, length)
            self._context.record(self._events[direction, slot], self._streams[direction])

    def _after(self, stream: int, other: int, direction: Direction, slot: int) -> None:
        """Let what comes into one stream begin after what is in another one now; the slot's event is free for it."""
        event = self._events[direction, slot]
        self._context.record(event, other)
        self._context.after_event(stream, event)

    def _copy(self, direction: Direction, there: int, address: int, length: int) -> None:
        stream = self._streams[direction]
        if direction is Direction.STORE:
            self._context.copy_out(address, there, length, stream)
        else:
            self._context.copy_in(there, address, length, stream)


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except CudaError as e:
        raise DeviceFailedError(str(e)) from e
