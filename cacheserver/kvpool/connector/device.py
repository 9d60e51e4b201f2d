# SPDX-License-Identifier: Apache-2.0
"""What kvpool has on the engine's CUDA device for its own kernels, all of it allocated before any capture."""

from collections.abc import Sequence
from typing import Final

from kvpool.connector.moments import Moments
from kvpool.transfer.kernels.groups import PagedGroup, prepare
from kvpool.transfer.kernels.paged import CudaEngineDevice
from kvpool.transfer.kernels.staged import StagedBlocks
from kvpool.transfer.planes import Layout, LayoutError
from kvpool.transfer.ring import slots_that_fit
from kvpool.transfer.tensors import Storage

__all__ = ["Device"]

_MIB: Final = 1 << 20


class Device:
    """The device that the engine's cache lies on. The engine's thread makes and calls it."""

    def __init__(self, moments: Moments, layouts: Sequence[Layout], storages: Sequence[Storage]) -> None:
        """Compile the kernels for *layouts* over *storages*.

        Raises:
            CudaError: out of memory.
        """
        self._context = moments.context
        addresses = [storage.address for storage in storages]
        with moments.entered():
            self._groups = prepare(self._context, [PagedGroup(layout, addresses) for layout in layouts])

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
