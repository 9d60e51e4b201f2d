# SPDX-License-Identifier: Apache-2.0
"""The engine's device: its paged cache by plane tables, the ring's memory, a side stream for each direction."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvpool.transfer.cuda import Context
from kvpool.transfer.kernels.groups import DeviceGroup
from kvpool.transfer.mover.messages import Direction, Ring
from kvpool.transfer.plan import WORD_BYTES, Part, Turn, parts_of, turns_of
from kvpool.transfer.planes import LayoutError
from kvpool.transfer.ring_ports import RingJob

__all__ = ["CudaEngineDevice"]

_PROGRAMS: Final = 1056
"""Blocks of a launch. On a busy device they crowd into the few multiprocessors that an engine's kernel just left, and
leave it the others. docs/benchmarks/ring.md has what other numbers did."""

_WINDOW_IDS: Final = 32768


class CudaEngineDevice:
    """Implements ``EngineDevice``.

    Everything is allocated here, before any graph is captured; nothing later allocates or synchronises the engine. The
    ring's memory serves one mover after the other: a new one has a new generation.
    """

    def __init__(
        self, context: Context, groups: Sequence[DeviceGroup], slots: int, slot_bytes: int, programs: int = _PROGRAMS
    ) -> None:
        """Allocate a ring of *slots* for each direction; the context is current in this thread.

        Raises:
            CudaError: out of memory, or the allocation cannot be exported.
        """
        self._context, self._groups = context, groups
        self._programs, self._slot_bytes = programs, slot_bytes
        self._base, handle = context.allocate_exported(2 * slots * slot_bytes)
        self.ring = Ring(
            device=context.uuid,
            handle=handle,
            slot_bytes=slot_bytes,
            slots=slots,
            generation=0,
        )
        # A stream for each slot: their kernels are independent, and on a busy device all that wait get their turn when
        # the engine's kernels leave room, not one after the other.
        self._streams = {d: [context.stream(urgent=True) for _ in range(slots)] for d in Direction}
        self._events = {d: [context.event() for _ in range(slots)] for d in Direction}
        self._most = max(_WINDOW_IDS, *(slot_bytes // g.layout.block_bytes for g in groups))
        self._ids = {d: _Window(context, self._most, self._events[d]) for d in Direction}
        self._wholes: tuple[int, ...] = ()
        self._parts: list[tuple[Part, ...]] = []

    def fit(self, blocks_per_chunk: Sequence[int]) -> None:
        """Say how many blocks a chunk of each group has; not while a job runs.

        Raises:
            LayoutError: a block does not fit a slot, or a chunk has too many blocks.
        """
        if max(blocks_per_chunk) > self._most:
            raise LayoutError(f"a chunk of {max(blocks_per_chunk)} blocks; a ring takes {self._most}")
        pairs = zip(self._groups, blocks_per_chunk, strict=True)
        self._parts = [parts_of(group.layout, whole, self._slot_bytes) for group, whole in pairs]
        self._wholes = tuple(blocks_per_chunk)

    def use(self) -> None:
        """See EngineDevice."""
        self._context.use()

    def turns(self, group: int, chunks: Sequence[int]) -> Iterator[Turn]:
        """See EngineDevice."""
        return turns_of(chunks, self._parts[group], self._slot_bytes)

    def follow(self, direction: Direction, event: int) -> None:
        """See EngineDevice."""
        for stream in self._streams[direction]:
            self._context.after_event(stream, event)

    def launch(self, direction: Direction, slot: int, job: RingJob, turn: Turn) -> None:
        """See EngineDevice."""
        group, stream = self._groups[job.group], self._streams[direction][slot]
        ids = self._ids[direction].place(job, turn, stream)
        place = self._base + self.ring.offset(direction, slot)
        arguments = group.arguments(turn.part, len(turn.chunks), self._wholes[job.group], ids, place)
        kernel, pieces = group.kernels[direction]
        kernel.launch(min(self._programs, -(-arguments[3] // pieces)), arguments, stream)
        self._context.record(self._events[direction][slot], stream)

    def wait(self, direction: Direction, slot: int) -> None:
        """See EngineDevice."""
        self._context.wait_event(self._events[direction][slot])

    def drain(self, direction: Direction) -> None:
        """See EngineDevice."""
        for stream in self._streams[direction]:
            self._context.wait_stream(stream)

    def free(self) -> None:
        """Give the ring back: when no lane runs, and the mover of this ring was reaped or never was."""
        with self._context.entered():
            for direction in Direction:
                self.drain(direction)
                for stream, event in zip(self._streams[direction], self._events[direction], strict=True):
                    self._context.drop_stream(stream)
                    self._context.drop_event(event)
            for window in self._ids.values():
                window.free()
            self._context.free(self._base)


class _Window:
    """The block ids of a job in device memory, as many at a time as there is room for. One thread.

    Device memory is written after the kernels that read it, and kernels follow the copy, by events alone. Two host
    buffers take turns, so that one is written while the copy from the other may still be under way.
    """

    def __init__(self, context: Context, most: int, kernels: Sequence[int]) -> None:
        """Have room for *most* ids; *kernels* are the events of all launches."""
        self._context, self._most, self._kernels = context, most, kernels
        self._device = context.allocate(most * WORD_BYTES)
        self._hosts = [context.allocate_host(most * WORD_BYTES) for _ in range(2)]
        self._copied = [context.event() for _ in range(2)]
        self._job: RingJob | None = None
        self._first = self._end = 0

    def place(self, job: RingJob, turn: Turn, stream: int) -> int:
        """Return where the ids of a turn's chunks are in device memory by the time that a kernel launched now runs."""
        if job is not self._job or not self._first <= turn.first <= self._end - len(turn.chunks):
            self._upload(job, turn.first, stream)
        else:
            self._context.after_event(stream, self._copied[-1])
        per_chunk: int = job.ids.shape[1]
        return self._device + (turn.first - self._first) * per_chunk * WORD_BYTES

    def free(self) -> None:
        """Give the memory back."""
        self._context.free(self._device)
        for host, copied in zip(self._hosts, self._copied, strict=True):
            self._context.free_host(host)
            self._context.drop_event(copied)

    def _upload(self, job: RingJob, first: int, stream: int) -> None:
        chunks = np.asarray(job.chunks[first : first + self._most // job.ids.shape[1]], dtype=np.int64)
        count = len(chunks) * job.ids.shape[1]
        host, copied = self._hosts[0], self._copied[0]
        self._context.wait_event(copied)  # the last but one: long over
        out = np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(host)).reshape(len(chunks), -1)
        np.take(job.ids, chunks, axis=0, out=out, mode="clip")
        for event in self._kernels:
            self._context.after_event(stream, event)
        self._context.copy_in(self._device, host, count * WORD_BYTES, stream)
        self._context.record(copied, stream)
        self._hosts.reverse()
        self._copied.reverse()
        self._job, self._first, self._end = job, first, first + len(chunks)
