# SPDX-License-Identifier: Apache-2.0
"""Mode mapped on a CUDA device: plane tables of the client's cache, the kernel's launches, and what they cost here."""

import ctypes
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, Protocol

import numpy as np

from kvpool.transfer.cuda import Context
from kvpool.transfer.mover.messages import Direction, Ring
from kvpool.transfer.mover.ports import Gather, MappedGroup
from kvpool.transfer.mover.runs import Costs
from kvpool.transfer.plan import WORD_BYTES, Part, PlaneTable, parts_of, plane_table

__all__ = ["Compiled", "Gathering"]

_SMALL_BYTES: Final = 4096
_SMALL_COPIES: Final = 64
_TRIES: Final = 5


class Compiled(Protocol):
    """The kernel for one table, see ``mover.kernel``."""

    def launch(self, arguments: Sequence[int], stream: int, *, scatter: bool) -> None:
        """Put a launch into a stream."""


class Gathering:
    """The kernels of one client's groups. Made by one thread; each direction is then used by its own. CudaError."""

    def __init__(
        self,
        context: Context,
        ring: Ring,
        base: int,
        groups: Sequence[MappedGroup],
        compiled: Callable[[PlaneTable], Compiled],
    ) -> None:
        """Compile, upload the tables, and have room for the block ids of each slot; *base*: the ring's address."""
        self._context, self._ring, self._base, self._groups = context, ring, base, groups
        self._streams = {d: context.stream(urgent=False) for d in Direction}
        self._tables = [plane_table(group.layout, group.addresses) for group in groups]
        self._addresses = [self._upload(table.rows) for table in self._tables]
        self._kernels = [compiled(table) for table in self._tables]
        most = max(max(g.whole, ring.slot_bytes // g.layout.block_bytes) for g in groups)
        # A direction's kernels read their ids on the device one after the other; on the host each slot has its own.
        self._ids = {d: context.allocate(most * WORD_BYTES) for d in Direction}
        slots = [(d, n) for d in Direction for n in range(ring.slots)]
        self._hosts = {slot: context.allocate_host(most * WORD_BYTES) for slot in slots}

    def stream(self, direction: Direction) -> int:
        """Return the stream of a direction's kernels."""
        return self._streams[direction]

    def launch(self, direction: Direction, slot: int, gather: Gather) -> None:
        """Put the kernel of one turn into its stream; nothing that was queued for the slot before runs any more."""
        stream, ids = self._streams[direction], self._ids[direction]
        host, count = self._hosts[direction, slot], gather.ids.size
        np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(host))[:] = gather.ids.ravel()
        self._context.copy_in(ids, host, count * WORD_BYTES, stream)
        place = self._base + self._ring.offset(direction, slot)
        chunks, whole = gather.ids.shape
        table, address = self._tables[gather.group], self._addresses[gather.group]
        arguments = table.arguments(gather.part, chunks, whole, address, ids, place)
        self._kernels[gather.group].launch(arguments, stream, scatter=direction is Direction.LOAD)

    def measure(self, copies: int) -> Costs:
        """Return what copies in the stream *copies*, and kernels, take beside the link. Gathers into the first slot."""
        group = self._groups[0]
        part, *others = parts_of(group.layout, group.whole, self._ring.slot_bytes)
        chunks = 1 if others else self._ring.slot_bytes // part.length
        full = Gather(0, part, np.resize(np.arange(group.layout.blocks, dtype=np.int64), (chunks, group.whole)))
        one = Gather(0, Part(0, 1, 0, 1, 0, group.layout.planes[0].block_bytes), full.ids[:1])
        scratch, small = self._hosts[Direction.STORE, 0], min(_SMALL_BYTES, self._ring.slot_bytes)
        small = min(small, full.ids.size * WORD_BYTES)

        def copy() -> None:
            for _ in range(_SMALL_COPIES):
                self._context.copy_out(scratch, self._base, small, copies)

        copying_s = self._shortest_s(copy, copies)
        kernels = self._streams[Direction.STORE]
        launch_s = self._shortest_s(lambda: self.launch(Direction.STORE, 0, one), kernels)
        full_s = self._shortest_s(lambda: self.launch(Direction.STORE, 0, full), kernels)
        byte_s = max(0.0, full_s - launch_s) / (chunks * part.length)
        return Costs(copy_s=copying_s / _SMALL_COPIES, launch_s=launch_s, byte_s=byte_s)

    def _shortest_s(self, queue: Callable[[], None], stream: int) -> float:
        """Return how long the quickest of some tries took, from queueing to its end."""
        taken = []
        for _ in range(_TRIES):
            begun_s = monotonic()
            queue()
            self._context.wait_stream(stream)
            taken.append(monotonic() - begun_s)
        return min(taken)

    def _upload(self, rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> int:
        address = self._context.allocate(rows.nbytes)
        stream = self._streams[Direction.STORE]
        self._context.copy_in(address, rows.ctypes.data, rows.nbytes, stream)
        self._context.wait_stream(stream)
        return address
