# SPDX-License-Identifier: Apache-2.0
"""The engine's device: its paged cache by plane tables, the ring's memory, a side stream for each direction."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.cuda import Context, Kernel
from kvpool.transfer.kernels.move import compiled
from kvpool.transfer.mover.messages import Direction, Ring
from kvpool.transfer.plan import COLUMNS, Part, PlaneTable, Turn, parts_of, plane_table, turns_of
from kvpool.transfer.planes import Layout
from kvpool.transfer.ring_ports import RingJob

__all__ = ["CudaEngineDevice", "PagedGroup"]

_WORD: Final = 8
_PROGRAMS: Final = 1056
"""Blocks of a launch. On a busy device they crowd into the few multiprocessors that an engine's kernel just left, and
leave it the others. docs/benchmarks/ring.md has what other numbers did."""

_WINDOW_IDS: Final = 32768


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """One cache group in device memory."""

    layout: Layout
    addresses: Sequence[int]
    """Where its storages begin."""

    blocks_per_chunk: int


@dataclass(frozen=True, slots=True)
class _Group:
    """A group, made ready."""

    table: PlaneTable
    address: int
    """Of the table in device memory."""

    parts: tuple[Part, ...]
    blocks_per_chunk: int
    kernels: dict[Direction, tuple[Kernel, int]]

    def arguments(self, part: Part, chunks: int, ids: int, slot: int) -> tuple[int, ...]:
        """Return the kernel's parameters; see ``kernels.move``."""
        first, end = int(self.table.firsts[part.first_plane]), int(self.table.firsts[part.end_plane])
        pieces, blocks = end - first, part.end_block - part.first_block
        return (
            self.address + first * COLUMNS * _WORD,
            ids + part.first_block * _WORD,
            slot,
            chunks * pieces * blocks,
            pieces,
            blocks,
            part.length,
            self.blocks_per_chunk,
            int(self.table.rows[first, 2]),
        )


class CudaEngineDevice:
    """Implements ``EngineDevice`` for the device that is current in the thread that makes it.

    Everything is allocated here, before any graph is captured; nothing later allocates or synchronises the engine.
    """

    def __init__(
        self,
        groups: Sequence[PagedGroup],
        slots: int,
        slot_bytes: int,
        generation: int = 0,
        programs: int = _PROGRAMS,
    ) -> None:
        """Allocate a ring of *slots* for each direction and compile the kernels.

        Raises:
            CudaError: out of memory, or the allocation cannot be exported.
            LayoutError: a block does not fit a slot.
        """
        self._context = Context.current()
        self._programs, self._slot_bytes = programs, slot_bytes
        self._base = self._context.allocate(2 * slots * slot_bytes)
        self.ring = Ring(
            device=self._context.uuid,
            handle=self._context.export(self._base),
            slot_bytes=slot_bytes,
            slots=slots,
            generation=generation,
        )
        # A stream for each slot: their kernels are independent, and on a busy device all that wait get their turn when
        # the engine's kernels leave room, not one after the other.
        self._streams = {d: [self._context.stream(urgent=True) for _ in range(slots)] for d in Direction}
        self._events = {d: [self._context.event() for _ in range(slots)] for d in Direction}
        self._groups = [self._ready(group) for group in groups]
        self._ids = {d: self._window(d) for d in Direction}

    def use(self) -> None:
        """See EngineDevice."""
        self._context.use()

    def turns(self, group: int, chunks: Sequence[int]) -> Iterator[Turn]:
        """See EngineDevice."""
        return turns_of(chunks, self._groups[group].parts, self._slot_bytes)

    def follow(self, direction: Direction, event: int) -> None:
        """See EngineDevice."""
        for stream in self._streams[direction]:
            self._context.after_event(stream, event)

    def launch(self, direction: Direction, slot: int, job: RingJob, turn: Turn) -> None:
        """See EngineDevice."""
        group, stream = self._groups[job.group], self._streams[direction][slot]
        ids = self._ids[direction].place(job, turn, stream)
        arguments = group.arguments(turn.part, len(turn.chunks), ids, self._base + self.ring.offset(direction, slot))
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
        """Give everything back: when no lane runs, and the mover of this ring was reaped or never was."""
        with self._context.entered():
            for direction in Direction:
                self.drain(direction)
                for stream, event in zip(self._streams[direction], self._events[direction], strict=True):
                    self._context.drop_stream(stream)
                    self._context.drop_event(event)
            for window in self._ids.values():
                window.free()
            for group in self._groups:
                self._context.free(group.address)
            self._context.free(self._base)

    def _ready(self, group: PagedGroup) -> _Group:
        table = plane_table(group.layout, group.addresses)
        kernels = {d: compiled(table, scatter=d is Direction.LOAD) for d in Direction}
        parts = parts_of(group.layout, group.blocks_per_chunk, self._slot_bytes)
        return _Group(table, self._upload(table.rows), parts, group.blocks_per_chunk, kernels)

    def _upload(self, rows: NDArray[np.int64]) -> int:
        address = self._context.allocate(rows.nbytes)
        stream = self._streams[Direction.STORE][0]
        self._context.copy_in(address, rows.ctypes.data, rows.nbytes, stream)
        self._context.wait_stream(stream)
        return address

    def _window(self, direction: Direction) -> "_Window":
        most = max((max(1, self._slot_bytes // g.parts[0].length)) * g.blocks_per_chunk for g in self._groups)
        return _Window(self._context, max(most, _WINDOW_IDS), self._events[direction])


class _Window:
    """The block ids of a job in device memory, as many at a time as there is room for. One thread.

    Device memory is written after the kernels that read it, and kernels follow the copy, by events alone. Two host
    buffers take turns, so that one is written while the copy from the other may still be under way.
    """

    def __init__(self, context: Context, most: int, kernels: Sequence[int]) -> None:
        """Have room for *most* ids; *kernels* are the events of all launches."""
        self._context, self._most, self._kernels = context, most, kernels
        self._device = context.allocate(most * _WORD)
        self._hosts = [context.allocate_host(most * _WORD) for _ in range(2)]
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
        return self._device + (turn.first - self._first) * per_chunk * _WORD

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
        self._context.copy_in(self._device, host, count * _WORD, stream)
        self._context.record(copied, stream)
        self._hosts.reverse()
        self._copied.reverse()
        self._job, self._first, self._end = job, first, first + len(chunks)
