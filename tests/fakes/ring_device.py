# SPDX-License-Identifier: Apache-2.0
"""A device whose memory is a file: the engine and a mover process map it, kernels are the NumPy twins."""

import atexit
import ctypes
import mmap
import os
import socket
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tests.fakes.mapped_device import MappedHalf

from kvpool.transfer import reference
from kvpool.transfer.mover.messages import Direction, Ring
from kvpool.transfer.mover.ports import DeviceFailedError
from kvpool.transfer.plan import NOWHERE, Turn, parts_of, turns_of
from kvpool.transfer.planes import Layout
from kvpool.transfer.ring_ports import RingJob

UUID = bytes(range(16))


def map_file(path: Path) -> np.ndarray:
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)


def make_ring(path: Path, slots: int, slot_bytes: int, generation: int = 0) -> Ring:
    """A ring's file, filled with what no test stores."""
    path.write_bytes(b"\xee" * (2 * slots * slot_bytes))
    link = Path(tempfile.gettempdir()) / f"kvpool-ring-{os.urandom(4).hex()}"
    link.symlink_to(path)  # a handle is short
    atexit.register(link.unlink, missing_ok=True)
    handle = str(link).encode().ljust(64, b"\0")
    return Ring(device=UUID, handle=handle, slot_bytes=slot_bytes, slots=slots, generation=generation)


def path_of(ring: Ring) -> Path:
    return Path(ring.handle.rstrip(b"\0").decode()).resolve()


@dataclass
class FakeEngineDevice:
    """Launched kernels run when they are waited for: as late as a real one may."""

    ring: Ring
    layout: Layout
    storages: list[np.ndarray]
    blocks_per_chunk: int
    events: list[int] = field(default_factory=list)
    launches: int = 0

    def __post_init__(self) -> None:
        self._memory = map_file(path_of(self.ring))
        self._parts = parts_of(self.layout, self.blocks_per_chunk, self.ring.slot_bytes)
        self._pending: dict[tuple[Direction, int], list[tuple[RingJob, Turn]]] = defaultdict(list)
        self._running = {(d, slot): threading.Lock() for d in Direction for slot in range(self.ring.slots)}

    def fit(self, blocks_per_chunk: Sequence[int]) -> None:
        (self.blocks_per_chunk,) = blocks_per_chunk
        self._parts = parts_of(self.layout, self.blocks_per_chunk, self.ring.slot_bytes)

    def use(self) -> None:
        pass

    def turns(self, group: int, chunks: Sequence[int]) -> Iterator[Turn]:
        assert group == 0
        return turns_of(chunks, self._parts, self.ring.slot_bytes)

    def follow(self, direction: Direction, event: int) -> None:
        del direction
        self.events.append(event)

    def launch(self, direction: Direction, slot: int, job: RingJob, turn: Turn) -> None:
        pending = self._pending[direction, slot]
        assert not any(job.grant for job, _ in pending), "a kernel was launched over another one that counts"
        pending.append((job, turn))
        self.launches += 1

    def wait(self, direction: Direction, slot: int) -> None:
        with self._running[direction, slot]:
            # As in a stream: in the order of their launches.
            while pending := self._pending[direction, slot]:
                self._run(direction, slot, *pending[0])
                pending.pop(0)

    def drain(self, direction: Direction) -> None:
        for slot in range(self.ring.slots):
            self.wait(direction, slot)

    def _run(self, direction: Direction, slot: int, job: RingJob, turn: Turn) -> None:
        start = self.ring.offset(direction, slot)
        for number, chunk in enumerate(turn.chunks):
            at = start + number * turn.part.length
            self._move(direction, job.ids[chunk], turn, self._memory[at : at + turn.part.length])

    def _move(self, direction: Direction, ids: np.ndarray, turn: Turn, slot: np.ndarray) -> None:
        part = turn.part
        chunk = np.zeros(self.layout.chunk_bytes(len(ids)), dtype=np.uint8)
        if direction is Direction.STORE:
            reference.gather_blocks(self.storages, self.layout, ids, chunk, NOWHERE)
            slot[:] = chunk[part.offset : part.offset + part.length]
            return
        # What the part does not bring is put back as it was.
        reference.gather_blocks(self.storages, self.layout, ids, chunk, NOWHERE)
        chunk[part.offset : part.offset + part.length] = slot
        reference.scatter_blocks(self.storages, self.layout, ids, 0, chunk, NOWHERE)


class FakeMoverDevice(MappedHalf):
    """Copies between the ring's file and host memory. A file beside the ring's, named .stall or .fail, does so.

    In mode mapped the ring is memory of its own, and the files lie beside the first one of the cache.
    """

    def __init__(self, ring: Ring) -> None:
        if ring.device != UUID:
            raise DeviceFailedError("no such device")
        self._path = path_of(ring) if ring.handle else Path()
        self._memory = map_file(self._path) if ring.handle else np.full(ring.length, 0xEE, dtype=np.uint8)
        self._registered: list[tuple[int, int]] = []
        super().__init__(ring, self._memory.ctypes.data)

    def use(self) -> None:
        pass

    def register(self, address: int, length: int) -> None:
        self._registered.append((address, length))

    def unregister(self, address: int) -> None:
        self._registered = [r for r in self._registered if r[0] != address]

    def copy(self, direction: Direction, ring_offset: int, address: int, length: int) -> None:
        self.copy_at(direction, self._memory.ctypes.data + ring_offset, address, length)

    def copy_at(self, direction: Direction, ring: int, address: int, length: int) -> None:
        if not any(a <= address and address + length <= a + n for a, n in self._registered):
            raise DeviceFailedError("a copy of memory that is not registered")
        target, source = (address, ring) if direction is Direction.STORE else (ring, address)
        ctypes.memmove(target, source, length)

    def mark(self, direction: Direction, slot: int) -> None:
        del direction, slot  # copies are made at once

    def wait(self, direction: Direction, slot: int) -> None:
        del direction, slot
        if self._path.with_suffix(".fail").exists():
            raise DeviceFailedError("an illegal address")
        if self._path.with_suffix(".stall").exists():
            read, _ = os.pipe()
            os.read(read, 1)  # for ever


def main(control: int, parent: int) -> None:
    from kvpool.transfer.mover.process import MoverProcess, die_with_parent

    die_with_parent(parent)
    MoverProcess(socket.socket(fileno=control), FakeMoverDevice).run()
