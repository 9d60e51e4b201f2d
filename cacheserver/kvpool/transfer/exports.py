# SPDX-License-Identifier: Apache-2.0
"""An engine's cache on a CUDA device, exported: allocations by their handles, virtual memory piece by piece.

The kind of each allocation is asked first. Virtual memory (expandable segments, say) is many allocations behind each
other: those that touch are one memory to the mover, which maps them in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvpool.transfer.cuda import Context, CudaError
from kvpool.transfer.mover.messages import CacheGroup, CachePlane, Export, Piece
from kvpool.transfer.planes import Layout, LayoutError
from kvpool.transfer.tensors import Storage

__all__ = ["CudaCache", "Memory", "memories_of"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory without a gap, as movers get it."""

    start: int
    pieces: tuple[int, ...]
    """Lengths of its allocations, one after the other."""

    has_handle: bool
    """True for one allocation that a handle stands for."""

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.start + sum(self.pieces)


def memories_of(storages: Sequence[Storage], find: Callable[[int], tuple[int, int, bool]]) -> list[Memory]:
    """Find the memory that *storages* lie in, in the order of its addresses.

    Args:
        storages: the engine's.
        find: address to base, length and kind of its allocation, as ``Context.allocation``.
    """
    found: dict[int, tuple[int, bool]] = {}
    for storage in storages:
        at = storage.address
        while at < storage.address + storage.length:
            base, length, has_handle = find(at)
            found[base] = (length, has_handle)
            at = base + length
    memories: list[Memory] = []
    for base, (length, has_handle) in sorted(found.items()):
        last = memories[-1] if memories else None
        if last is None or has_handle or last.has_handle or last.end != base:
            memories.append(Memory(base, (length,), has_handle))
        else:
            memories[-1] = replace(last, pieces=(*last.pieces, length))
    return memories


class CudaCache:
    """See ``mapped.EngineCache``. Made in the engine's thread; the client's threads use the rest."""

    def __init__(self, context: Context, layouts: Sequence[Layout], storages: Sequence[Storage]) -> None:
        """Find out what the cache lies in; the context is current in this thread.

        Raises:
            CudaError: the driver does not say.
        """
        self._context, self._layouts, self._storages = context, layouts, storages
        self._memories = memories_of(storages, context.allocation)
        self._wholes: tuple[int, ...] = ()

    def fit(self, blocks_per_chunk: Sequence[int]) -> None:
        """Learn how many blocks a chunk of each group has."""
        self._wholes = tuple(blocks_per_chunk)

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        """See EngineCache."""
        try:
            self._context.use()
            for number, memory in enumerate(self._memories):
                at = memory.start
                for length in memory.pieces:
                    if memory.has_handle:
                        yield Piece(memory=number, length=length, handle=self._context.export(at)), -1
                    else:
                        yield Piece(memory=number, length=length), self._context.export_descriptor(at)
                    at += length
        except CudaError as e:
            raise LayoutError(f"the engine's cache cannot be exported: {e}") from e

    def export(self) -> Export:
        """See EngineCache."""
        pairs = zip(self._layouts, self._wholes, strict=True)
        return Export(groups=tuple(self._group(layout, whole) for layout, whole in pairs))

    def wait(self, event: int) -> None:
        """See EngineCache."""
        self._context.use()
        self._context.wait_event(event)

    def _group(self, layout: Layout, whole: int) -> CacheGroup:
        planes = []
        for plane in layout.planes:
            address = self._storages[plane.storage].address + plane.offset
            number = next(n for n, m in enumerate(self._memories) if m.start <= address < m.end)
            start = self._memories[number].start
            planes.append(CachePlane(number, address - start, plane.stride, plane.block_bytes))
        return CacheGroup(planes=tuple(planes), blocks=layout.blocks, blocks_per_chunk=whole)
