# SPDX-License-Identifier: Apache-2.0
"""From an engine's paged tensors to planes: where block *b* of one layer lies, as plain numbers.

A block is opaque bytes. Nothing here knows heads or head sizes; it only has to find the runs of memory that belong to
one block. A tensor whose inner dimensions fill one run is one plane (whatever their order); one whose block is spread
over several runs (keys and values apart, heads outside the blocks) becomes one plane for each run.

The bytes of a chunk are plane-major: for each plane in order, the chunk's blocks in token order.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from kvpool.model.layout import PlaneSpec

__all__ = ["Layout", "LayoutError", "PagedTensor", "Plane", "layout_of"]


class LayoutError(ValueError):
    """The engine's tensors cannot be cut into planes; the text says which one and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedTensor:
    """One layer's paged cache as the engine hands it over; dimension 0 counts blocks."""

    name: str
    storage: int
    """Number of the storage that it lies in; several layers may share one."""

    offset: int
    """Bytes from the start of the storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, one for each dimension."""

    item_bytes: int
    packing: str
    """What decides how the engine's kernel arranges the bytes inside a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One run of bytes in each block: block *b* begins at ``offset + b * stride`` of its storage."""

    name: str
    storage: int
    offset: int
    stride: int
    block_bytes: int
    packing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All planes of one cache group."""

    planes: tuple[Plane, ...]
    blocks: int
    """Blocks that exist; ids run from 0 to one less."""

    block_tokens: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return sum(plane.block_bytes for plane in self.planes)

    def chunk_bytes(self, blocks_per_chunk: int) -> int:
        """Bytes of one rank's part of one chunk: what a slot must hold."""
        return self.block_bytes * blocks_per_chunk

    def specs(self) -> tuple[PlaneSpec, ...]:
        """Return the planes without their addresses, for the layout's fingerprint."""
        return tuple(
            PlaneSpec(name=p.name, block_bytes=p.block_bytes, block_tokens=self.block_tokens, packing=p.packing)
            for p in self.planes
        )


def layout_of(tensors: Sequence[PagedTensor], blocks: int, block_tokens: int) -> Layout:
    """Cut *tensors* into planes.

    Args:
        tensors: the layers in their canonical order; a layer that shares another one's memory is left out.
        blocks: the engine's number of blocks. A tensor may have a multiple of it (a kernel with smaller blocks): rows
            are then regrouped.
        block_tokens: tokens of one block.

    Raises:
        LayoutError: there is no tensor, or one does not fit *blocks*.
    """
    planes: dict[tuple[int, int, int], Plane] = {}
    for tensor in tensors:
        for plane in _planes_of(tensor, blocks):
            planes.setdefault((plane.storage, plane.offset, plane.stride), plane)
    if not planes:
        raise LayoutError("the engine registered no cache tensors")
    return Layout(planes=tuple(planes.values()), blocks=blocks, block_tokens=block_tokens)


def _planes_of(tensor: PagedTensor, blocks: int) -> Iterator[Plane]:
    if 0 in tensor.shape:
        raise LayoutError(f"{tensor.name} has no elements")
    rows, rest = divmod(tensor.shape[0], blocks)
    if rest or not rows:
        raise LayoutError(f"{tensor.name}: {tensor.shape[0]} rows are no multiple of {blocks} blocks")
    inner = [(rows, tensor.strides[0]), *zip(tensor.shape[1:], tensor.strides[1:], strict=True)]
    run, apart = _longest_run(tensor.item_bytes, inner)
    stride = rows * tensor.strides[0]
    if blocks > 1 and run > stride:
        raise LayoutError(f"{tensor.name}: blocks of {run} bytes overlap at a distance of {stride} bytes")
    offsets = [tensor.offset + sum(steps) for steps in product(*_steps(apart))]
    for number, offset in enumerate(offsets):
        name = tensor.name if len(offsets) == 1 else f"{tensor.name}.{number}"
        yield Plane(
            name=name,
            storage=tensor.storage,
            offset=offset,
            stride=stride,
            block_bytes=run,
            packing=tensor.packing,
        )


def _longest_run(item_bytes: int, dimensions: Iterable[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """Merge dimensions, smallest stride first, while they follow each other without a gap.

    Returns:
        The run's bytes, and the dimensions (length, stride) that did not merge, largest stride first.
    """
    left = sorted((d for d in dimensions if d[0] != 1), key=lambda d: d[1], reverse=True)
    run = item_bytes
    while left and left[-1][1] == run:
        run *= left.pop()[0]
    return run, left


def _steps(dimensions: Iterable[tuple[int, int]]) -> list[range]:
    return [range(0, length * stride, stride) for length, stride in dimensions]
