# SPDX-License-Identifier: Apache-2.0
"""Cache groups in device memory, made ready for the kernels: plane tables uploaded, kernels compiled."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.transfer.cuda import Context, Kernel
from kvpool.transfer.kernels.move import compiled
from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.plan import Part, PlaneTable, plane_table
from kvpool.transfer.planes import Layout

__all__ = ["DeviceGroup", "PagedGroup", "prepare"]


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """One cache group in device memory."""

    layout: Layout
    addresses: Sequence[int]
    """Where its storages begin."""


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """A group, made ready."""

    layout: Layout
    table: PlaneTable
    address: int
    """Of the table in device memory."""

    kernels: dict[Direction, tuple[Kernel, int]]
    """For each direction a kernel, and how many pieces one of its programs moves."""

    def arguments(self, part: Part, chunks: int, whole: int, ids: int, slot: int) -> tuple[int, ...]:
        """Return the kernel's parameters for a part of *chunks* chunks of *whole* blocks; see ``kernels.move``."""
        return self.table.arguments(part, chunks, whole, self.address, ids, slot)


def prepare(context: Context, groups: Sequence[PagedGroup]) -> list[DeviceGroup]:
    """Compile the kernels of all groups and upload their tables, which stay for the engine's life.

    Raises:
        CudaError: out of memory.
    """
    stream = context.stream(urgent=False)
    made = []
    for group in groups:
        table = plane_table(group.layout, group.addresses)
        address = context.allocate(table.rows.nbytes)
        context.copy_in(address, table.rows.ctypes.data, table.rows.nbytes, stream)
        context.wait_stream(stream)
        # A kernel keeps its parameters' memory, so each direction's thread has its own.
        kernels = {d: compiled(table, scatter=d is Direction.LOAD) for d in Direction}
        made.append(DeviceGroup(group.layout, table, address, kernels))
    context.drop_stream(stream)
    return made
