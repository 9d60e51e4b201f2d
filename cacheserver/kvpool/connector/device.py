# SPDX-License-Identifier: Apache-2.0
"""The engine's CUDA device: its context, its stream, and what kvpool allocates on it, all of it before any capture."""

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch

from kvpool.transfer.cuda import Context
from kvpool.transfer.kernels.groups import PagedGroup, prepare
from kvpool.transfer.kernels.paged import CudaEngineDevice
from kvpool.transfer.kernels.staged import StagedBlocks
from kvpool.transfer.planes import Layout, LayoutError
from kvpool.transfer.ring import slots_that_fit
from kvpool.transfer.tensors import Storage

__all__ = ["Device", "DeviceMoment"]

_EVENTS: Final = 64
_MIB: Final = 1 << 20


class DeviceMoment:
    """A ``Moment`` of the client. Its event goes back to the others when nobody has the moment any more."""

    __slots__ = ("__weakref__", "_context", "event")

    def __init__(self, context: Context, event: int) -> None:
        self._context, self.event = context, event

    def wait(self) -> None:
        """Wait until the device is there; in a thread of our own."""
        self._context.use()
        self._context.wait_event(self.event)


class Device:
    """The device that the engine's cache lies on. The engine's thread makes and calls it."""

    def __init__(self, layouts: Sequence[Layout], storages: Sequence[Storage]) -> None:
        """Compile the kernels for *layouts* over *storages*.

        Raises:
            CudaError: out of memory, or there is no driver.
        """
        self._torch = torch.device("cuda", storages[0].device)
        with torch.cuda.device(self._torch):
            torch.cuda.current_stream().synchronize()  # makes torch's context current in this thread
            self._context = Context.current()
            addresses = [storage.address for storage in storages]
            self._groups = prepare(self._context, [PagedGroup(layout, addresses) for layout in layouts])
            self._events = deque(self._context.event() for _ in range(_EVENTS))

    def staged(self, stage_bytes: int) -> StagedBlocks:
        """Return what moves blocks chunk by chunk.

        Raises:
            CudaError: out of memory.
        """
        with self._context.entered():
            return StagedBlocks(self._context, self._groups, stage_bytes)

    def ring(self, slots: int, slot_bytes: int, keep_bytes: int) -> CudaEngineDevice:
        """Allocate a ring, a smaller one if memory is short.

        Raises:
            LayoutError: not even that fits; the text has the numbers.
            CudaError: the memory cannot be had, or not exported.
        """
        with self._context.entered():
            free = self._context.free_bytes()
            fit = slots_that_fit(free, keep_bytes, slots, slot_bytes)
            if not fit:
                raise LayoutError(
                    f"{free // _MIB} MiB of device memory are free; a ring of two slots for each direction needs "
                    f"{4 * slot_bytes // _MIB} MiB beside the {keep_bytes // _MIB} MiB that stay free: lower the "
                    "engine's share of the memory, ring_slot_bytes or ring_keep_bytes"
                )
            return CudaEngineDevice(self._context, self._groups, fit, slot_bytes)

    def moment(self) -> DeviceMoment:
        """Return where the engine's current stream is now."""
        with self._context.entered():
            event = self._events.popleft() if self._events else self._context.event()
            self._context.record(event, torch.cuda.current_stream(self._torch).cuda_stream)
        made = DeviceMoment(self._context, event)
        weakref.finalize(made, self._events.append, event)
        return made
