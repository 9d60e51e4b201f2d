# SPDX-License-Identifier: Apache-2.0
"""The arena as a mover sees it: segments that came as descriptors, mapped at once, registered in the background."""

import ctypes
import mmap
import os
import threading
from dataclasses import dataclass, field
from typing import Final

from kvpool.transfer.mover.ports import MoverDevice

__all__ = ["Memory", "UnknownMemoryError"]

_MADV_DONTFORK: Final = mmap.MADV_DONTFORK


class UnknownMemoryError(LookupError):
    """The server did not give this memory, or a part lies outside of it."""


@dataclass(slots=True)
class _Segment:
    mapping: mmap.mmap
    address: int
    length: int
    registered: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Memory:
    """Segments by the number of their memory.

    ``add`` and ``forget`` from one thread, ``address`` from any, ``register_next`` from the background.
    """

    def __init__(self, device: MoverDevice) -> None:
        self._device = device
        self._segments: dict[int, _Segment] = {}

    def add(self, memory: int, descriptor: int, length: int) -> None:
        """Map a segment."""
        try:
            mapping = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        mapping.madvise(_MADV_DONTFORK)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._segments[memory] = _Segment(mapping, address, length)

    def forget(self, memory: int) -> None:
        """Let go of a segment that no copy uses. The thread of ``add``.

        Raises:
            DeviceFailedError: the device does not.
        """
        segment = self._segments.pop(memory, None)
        if segment is None:
            return
        with segment.lock:
            if segment.registered:
                self._device.unregister(segment.address)
            # The background may have this segment in hand; it must not register it now.
            segment.registered = True
            segment.mapping.close()

    def address(self, memory: int, offset: int, length: int) -> int:
        """Return where a part lies in this process, ready for copies; registers the segment if that is not done yet.

        Raises:
            UnknownMemoryError: there is no such part.
            DeviceFailedError: it cannot be registered.
        """
        found = self._found(memory, offset, length)
        self._register(found)
        return found.address + offset

    def bytes_at(self, memory: int, offset: int, length: int) -> memoryview:
        """Return a part as it is now; not to be kept beyond the grant that names it. Any thread.

        Raises:
            UnknownMemoryError: there is no such part.
        """
        found = self._found(memory, offset, length)
        return memoryview((ctypes.c_ubyte * length).from_address(found.address + offset)).cast("B")

    def register_next(self) -> bool:
        """Register one segment that is not yet; False if all are.

        Raises:
            DeviceFailedError: it cannot be registered.
        """
        for segment in list(self._segments.values()):
            if not segment.registered:
                self._register(segment)
                return True
        return False

    def _found(self, memory: int, offset: int, length: int) -> _Segment:
        found = self._segments.get(memory)
        if found is None or offset + length > found.length:
            raise UnknownMemoryError(f"bytes {offset} to {offset + length} of memory {memory}")
        return found

    def _register(self, segment: _Segment) -> None:
        if segment.registered:
            return
        with segment.lock:
            if not segment.registered:
                self._device.register(segment.address, segment.length)
                segment.registered = True
