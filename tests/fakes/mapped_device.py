# SPDX-License-Identifier: Apache-2.0
"""Device memory that an engine exports and a mover maps: files, by a path for a handle or by descriptors.

The kernel is an imitation of the real one: it reads the same table and the same numbers, one piece after the other.
"""

import atexit
import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvpool.transfer.mover.messages import CacheGroup, CachePlane, Direction, Export, Piece, Ring
from kvpool.transfer.mover.ports import DeviceCopy, DeviceFailedError, Gather, MappedGroup
from kvpool.transfer.mover.runs import Costs
from kvpool.transfer.plan import PlaneTable, plane_table
from kvpool.transfer.planes import Layout

PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_FIXED = 0x10
COSTS = Costs(copy_s=2e-6, launch_s=2e-5, byte_s=1e-12)
KERNEL_ONLY = Costs(copy_s=1.0, launch_s=0.0, byte_s=0.0)
COPIES_ONLY = Costs(copy_s=0.0, launch_s=1.0, byte_s=1.0)


def map_files(pieces: Sequence[tuple[int, int]]) -> int:
    """Map files (descriptor, or -1 for none; length) one after the other, for good; returns the address."""
    whole = sum(-(-length // PAGE) * PAGE for _, length in pieces)
    start = at = _mapped(0, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    for descriptor, length in pieces:
        if descriptor >= 0:
            mapped(at, length, descriptor)
        at += length
    return start


def mapped(address: int, length: int, descriptor: int) -> None:
    """Map a file over what is at an address."""
    if os.fstat(descriptor).st_size < length:
        raise DeviceFailedError("a piece is not as long")
    _mapped(address, length, mmap.MAP_SHARED | _FIXED, descriptor)


def _mapped(address: int, length: int, flags: int, descriptor: int) -> int:
    made = _LIBC.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if made in (None, 2**64 - 1):
        raise DeviceFailedError(f"mmap: {os.strerror(ctypes.get_errno())}")
    return made


def bytes_at(address: int, length: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


class FileCache:
    """An engine's cache in files; an ``EngineCache``.

    Each storage is one memory: a file that travels by its name, or (*virtual*) files of a few pages by descriptors.
    """

    def __init__(self, folder: Path, layouts: Sequence[tuple[Layout, int]], *, virtual: bool = False) -> None:
        self.layouts, self.virtual, self.events = layouts, virtual, []
        self.files: list[list[tuple[Path, int]]] = []
        self.storages: list[np.ndarray] = []
        rng = np.random.default_rng(1)
        for number, length in enumerate(_lengths([layout for layout, _ in layouts])):
            step = max(3, length // PAGE // 5) * PAGE if virtual else length
            sizes = [min(step, length - at) for at in range(0, length, step)]
            files = [(folder / f"cache.{number}.{n}", size) for n, size in enumerate(sizes)]
            for path, size in files:
                path.write_bytes(rng.integers(0, 256, size, dtype=np.uint8).tobytes())
            descriptors = [(os.open(path, os.O_RDWR), size) for path, size in files]
            self.storages.append(bytes_at(map_files(descriptors), length))
            for descriptor, _ in descriptors:
                os.close(descriptor)
            self.files.append(files)

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        for memory, files in enumerate(self.files):
            for path, size in files:
                if self.virtual:
                    yield Piece(memory=memory, length=size), os.open(path, os.O_RDWR)
                else:
                    yield Piece(memory=memory, length=size, handle=_handle(path)), -1

    def export(self) -> Export:
        return Export(groups=tuple(_group(layout, whole) for layout, whole in self.layouts))

    def fit(self, blocks_per_chunk: Sequence[int]) -> None:
        self.layouts = [(layout, n) for (layout, _), n in zip(self.layouts, blocks_per_chunk, strict=True)]

    def wait(self, event: int) -> None:
        self.events.append(event)

    @property
    def ways(self) -> list[str]:
        """How the mover moved each turn."""
        path = self.files[0][0][0].with_suffix(".ways")
        return path.read_text().split() if path.exists() else []

    def let(self, what: str) -> Path:
        """Let the mover fail, stall, use copies or the kernel alone; until the file is gone."""
        path = self.files[0][0][0].with_suffix(f".{what}")
        path.touch()
        return path


def _handle(path: Path) -> bytes:
    link = Path(tempfile.gettempdir()) / f"kvpool-cache-{os.urandom(4).hex()}"
    link.symlink_to(path)  # a handle is short
    atexit.register(link.unlink, missing_ok=True)
    return str(link).encode().ljust(64, b"\0")


def _lengths(layouts: Sequence[Layout]) -> list[int]:
    ends: dict[int, int] = {}
    for layout in layouts:
        for p in layout.planes:
            end = p.offset + (layout.blocks - 1) * p.stride + p.block_bytes
            ends[p.storage] = max(ends.get(p.storage, 0), end)
    return [ends[storage] for storage in range(len(ends))]


def _group(layout: Layout, whole: int) -> CacheGroup:
    planes = tuple(CachePlane(p.storage, p.offset, p.stride, p.block_bytes) for p in layout.planes)
    return CacheGroup(planes=planes, blocks=layout.blocks, blocks_per_chunk=whole)


class MappedHalf:
    """What a mover's device does in mode mapped."""

    def __init__(self, ring: Ring, base: int) -> None:
        self._ring, self._base = ring, base
        self._tables: list[PlaneTable] = []

    def attach(self, pieces: Sequence[tuple[Piece, int]]) -> int:
        handle = pieces[0][0].handle
        if handle is None:
            self._remember(Path(f"/proc/self/fd/{pieces[0][1]}").resolve())
            return map_files([(descriptor, piece.length) for piece, descriptor in pieces])
        path = Path(handle.rstrip(b"\0").decode()).resolve()
        self._remember(path)
        try:
            with path.open("r+b") as file:
                return map_files([(file.fileno(), pieces[0][0].length)])
        except OSError as e:
            raise DeviceFailedError(str(e)) from e

    def _remember(self, path: Path) -> None:
        if self._path == Path():
            self._path = path

    def prepare(self, groups: Sequence[MappedGroup]) -> Costs:
        self._tables = [plane_table(group.layout, group.addresses) for group in groups]
        if self._path.with_suffix(".refuse").exists():
            raise DeviceFailedError("the kernel cannot be made")
        if self._path.with_suffix(".kernel").exists():
            return KERNEL_ONLY
        return COPIES_ONLY if self._path.with_suffix(".copies").exists() else COSTS

    def by_kernel(self, direction: Direction, slot: int, gather: Gather, copies: Sequence[DeviceCopy]) -> None:
        self._note("kernel")
        if direction is Direction.STORE:
            self._launch(direction, slot, gather)
        for offset, address, length in copies:
            self.copy(direction, offset, address, length)
        if direction is Direction.LOAD:
            self._launch(direction, slot, gather)

    def by_copies(self, direction: Direction, slot: int, copies: Sequence[DeviceCopy]) -> None:
        del slot
        self._note("copies")
        for there, address, length in copies:
            self.copy_at(direction, there, address, length)

    def _note(self, way: str) -> None:
        with self._path.with_suffix(".ways").open("a") as file:
            file.write(f"{way}\n")

    def _launch(self, direction: Direction, slot: int, gather: Gather) -> None:
        table, ids = self._tables[gather.group], np.ascontiguousarray(gather.ids)
        chunks, whole = ids.shape
        place = self._base + self._ring.offset(direction, slot)
        numbers = table.arguments(gather.part, chunks, whole, table.rows.ctypes.data, ids.ctypes.data, place)
        move(numbers, table.word_bytes, scatter=direction is Direction.LOAD)


def move(numbers, word, *, scatter):
    """The kernel, over memory of this process."""
    table, ids, slot, total, pieces, blocks, step, whole, base = numbers
    for at in range(total):
        block, chunk = at % blocks, at // (blocks * pieces)
        row = (ctypes.c_int64 * 6).from_address(table + at // blocks % pieces * 48)
        number = ctypes.c_int64.from_address(ids + 8 * (chunk * whole + block)).value
        cache = row[0] + number * row[1]
        ring = slot + chunk * step + (row[2] - base) * whole + block * row[3] + row[4]
        if scatter and number >= 0:
            ctypes.memmove(cache, ring, row[5] * word)
        elif not scatter and number >= 0:
            ctypes.memmove(ring, cache, row[5] * word)
        elif not scatter:
            ctypes.memset(ring, 0, row[5] * word)
