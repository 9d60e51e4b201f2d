# SPDX-License-Identifier: Apache-2.0
"""A mover's device: the client's ring by its handle, a copy stream and an event a slot for each direction."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.transfer.cuda import Context, CudaError
from kvpool.transfer.mover.messages import Direction, Ring
from kvpool.transfer.mover.ports import DeviceFailedError

__all__ = ["CudaMoverDevice"]


class CudaMoverDevice:
    """Implements ``MoverDevice``. It goes with its process: nothing is given back one by one."""

    def __init__(self, ring: Ring) -> None:
        """Open the ring on its device.

        Raises:
            DeviceFailedError: the device is not visible, the handle is refused, or memory is short.
        """
        with _failing():
            self._context = Context.of_uuid(ring.device)
            self._context.use()
            self._base = self._context.open(ring.handle)
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
            if direction is Direction.STORE:
                self._context.copy_out(address, self._base + ring_offset, length, self._streams[direction])
            else:
                self._context.copy_in(self._base + ring_offset, address, length, self._streams[direction])

    def mark(self, direction: Direction, slot: int) -> None:
        """See MoverDevice."""
        with _failing():
            self._context.record(self._events[direction, slot], self._streams[direction])

    def wait(self, direction: Direction, slot: int) -> None:
        """See MoverDevice."""
        with _failing():
            self._context.wait_event(self._events[direction, slot])


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except CudaError as e:
        raise DeviceFailedError(str(e)) from e
