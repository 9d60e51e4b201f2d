# SPDX-License-Identifier: Apache-2.0
"""Blocks in device memory, chunk by chunk through a small stage: for engines whose ring cannot be used.

A kernel gathers part of a chunk into the stage, and a copy engine brings it to where it is wanted, if that is memory
that it reaches (a slot in mapped memory whose pages are locked). Else (a frame, a mapping that is not locked yet) it
brings it to page-locked memory, and this process copies it from there. Loads are the mirror image. Two halves take
turns, each in a stream of its own, so that kernels, copy engine and CPU work at the same time.
"""

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.model.layout import NOWHERE
from kvpool.transfer.cuda import Context
from kvpool.transfer.kernels.groups import DeviceGroup
from kvpool.transfer.locks import CudaLocks
from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.plan import WORD_BYTES, Part, parts_of, slot_ids

__all__ = ["StagedBlocks"]

STAGE_BYTES: Final = 4 << 20
_IDS: Final = 32768
_PROGRAMS: Final = 264
_HALVES: Final = 2
_ALIGNED: Final = 256
"""Kernels move words of up to 16 bytes."""


class StagedBlocks:
    """A ``BlockPort`` of the client. Stores from one thread, loads from another."""

    def __init__(self, context: Context, groups: Sequence[DeviceGroup], stage_bytes: int = STAGE_BYTES) -> None:
        """Allocate a stage of *stage_bytes* for each direction, or larger if a block needs that.

        Raises:
            CudaError: out of memory.
        """
        largest = max(p.block_bytes for g in groups for p in g.layout.planes)
        half_bytes = -(-max(stage_bytes // _HALVES, largest) // _ALIGNED) * _ALIGNED
        self._groups = groups
        self._stages = {d: _Stage(context, half_bytes) for d in Direction}
        self.locks = CudaLocks(context)

    def gather(self, group: int, block_ids: NDArray[np.int64], out: memoryview) -> None:
        """Copy the blocks of one chunk into *out*; NOWHERE is filled with zeros.

        Raises:
            IndexError, ValueError: the ids, the group or the size do not fit; nothing has been copied.
        """
        made, ids, target = self._checked(group, block_ids, 0, out)
        stage = self._stages[Direction.STORE]
        direct = self.locks.reach(target.ctypes.data, target.size)
        parts = stage.begin(ids, made)
        try:
            for number, part in enumerate(parts):
                host = _bytes_of(target, part) if direct else stage.host(number, part.length)
                stage.gather(number, made, part, len(ids), host)
                if number and not direct:
                    stage.take(number - 1, _bytes_of(target, parts[number - 1]))
            if not direct:
                stage.take(len(parts) - 1, _bytes_of(target, parts[-1]))
        finally:
            stage.settle()

    def scatter(self, group: int, block_ids: NDArray[np.int64], skip_blocks: int, data: memoryview) -> None:
        """Copy one chunk into its blocks but the first *skip_blocks*.

        Raises:
            IndexError, ValueError: the ids, the group or the size do not fit; nothing has been copied.
        """
        made, ids, source = self._checked(group, block_ids, skip_blocks, data)
        stage = self._stages[Direction.LOAD]
        direct = self.locks.reach(source.ctypes.data, source.size)
        parts = stage.begin(ids, made)
        try:
            for number, part in enumerate(parts):
                host = _bytes_of(source, part)
                stage.scatter(number, made, part, len(ids), host if direct else stage.put(number, host))
        finally:
            stage.settle()

    def _checked(
        self, group: int, block_ids: NDArray[np.int64], skip_blocks: int, data: memoryview
    ) -> tuple[DeviceGroup, NDArray[np.int64], NDArray[np.uint8]]:
        if not 0 <= group < len(self._groups):
            raise ValueError(f"group {group} of {len(self._groups)}")
        layout = self._groups[group].layout
        if len(data) != layout.chunk_bytes(len(block_ids)) or len(block_ids) > _IDS:
            raise ValueError(f"group {group} with {len(data)} bytes for {len(block_ids)} blocks")
        skip = np.array([skip_blocks], dtype=np.int64)
        ids = slot_ids(block_ids[None, :], layout.blocks, null_block=NOWHERE, skip=skip)[0]
        return self._groups[group], ids, np.frombuffer(data, dtype=np.uint8)


class _Stage:
    """One direction's memory. One thread."""

    def __init__(self, context: Context, half_bytes: int) -> None:
        self._context, self._half_bytes = context, half_bytes
        self._device = context.allocate(_HALVES * half_bytes)
        self._ids = context.allocate(_IDS * WORD_BYTES)
        self._host_ids = context.allocate_host(_IDS * WORD_BYTES)
        self._hosts = [context.allocate_host(half_bytes) for _ in range(_HALVES)]
        self._streams = [context.stream(urgent=True) for _ in range(_HALVES)]
        self._done = [context.event() for _ in range(_HALVES)]
        self._ready = False

    def begin(self, ids: NDArray[np.int64], group: DeviceGroup) -> tuple[Part, ...]:
        """Bring a chunk's ids to the device; returns the parts that it is moved in."""
        if not self._ready:
            self._context.use()  # the first call comes from the thread of all others
            self._ready = True
        _view(self._host_ids, ids.nbytes)[:] = ids.view(np.uint8)
        first, *others = self._streams
        self._context.copy_in(self._ids, self._host_ids, ids.nbytes, first)
        self._context.record(self._done[0], first)
        for stream in others:
            self._context.after_event(stream, self._done[0])
        return parts_of(group.layout, len(ids), self._half_bytes)

    def gather(self, number: int, group: DeviceGroup, part: Part, whole: int, host: NDArray[np.uint8]) -> None:
        """Queue the gather of a part and its copy to memory that the copy engine reaches."""
        half = number % _HALVES
        self._launch(Direction.STORE, half, group, part, whole)
        self._context.copy_out(host.ctypes.data, self._place(half), part.length, self._streams[half])
        self._context.record(self._done[half], self._streams[half])

    def scatter(self, number: int, group: DeviceGroup, part: Part, whole: int, host: NDArray[np.uint8]) -> None:
        """Queue the copy of a part from memory that the copy engine reaches, and its scatter."""
        half = number % _HALVES
        self._context.copy_in(self._place(half), host.ctypes.data, part.length, self._streams[half])
        self._launch(Direction.LOAD, half, group, part, whole)
        self._context.record(self._done[half], self._streams[half])

    def host(self, number: int, length: int) -> NDArray[np.uint8]:
        """Return page-locked memory of a part's half, once nothing that was queued uses it any more."""
        self._context.wait_event(self._done[number % _HALVES])
        return _view(self._hosts[number % _HALVES], length)

    def put(self, number: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Copy a part's bytes to page-locked memory and return it."""
        host = self.host(number, data.size)
        np.copyto(host, data)
        return host

    def take(self, number: int, out: NDArray[np.uint8]) -> None:
        """Wait for a part's bytes and copy them out of page-locked memory."""
        np.copyto(out, self.host(number, out.size))

    def settle(self) -> None:
        """Wait until everything that was queued is done."""
        for stream in self._streams:
            self._context.wait_stream(stream)

    def _place(self, half: int) -> int:
        return self._device + half * self._half_bytes

    def _launch(self, way: Direction, half: int, group: DeviceGroup, part: Part, whole: int) -> None:
        kernel, pieces = group.kernels[way]
        arguments = group.arguments(part, 1, whole, self._ids, self._place(half))
        kernel.launch(min(_PROGRAMS, -(-arguments[3] // pieces)), arguments, self._streams[half])


def _bytes_of(chunk: NDArray[np.uint8], part: Part) -> NDArray[np.uint8]:
    return chunk[part.offset : part.offset + part.length]


def _view(address: int, length: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
