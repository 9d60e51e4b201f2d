# SPDX-License-Identifier: Apache-2.0
"""What an engine's cache is exported as; the driver is a table of allocations."""

from dataclasses import dataclass, field

import pytest

from kvpool.transfer.cuda import CudaError
from kvpool.transfer.exports import CudaCache, Memory, memories_of
from kvpool.transfer.mover.messages import CachePlane, Piece
from kvpool.transfer.planes import Layout, LayoutError, Plane
from kvpool.transfer.tensors import Storage

MIB = 1 << 20
PLAIN, FIRST, SECOND, THIRD, FAR = 0x1000_0000, 0x5000_0000, 0x5020_0000, 0x5040_0000, 0x9000_0000


@dataclass
class Driver:
    """A ``Context`` with some allocations: base to length and kind."""

    allocations: dict[int, tuple[int, bool]]
    refused: frozenset[int] = frozenset()
    calls: list[str] = field(default_factory=list)

    def allocation(self, address: int) -> tuple[int, int, bool]:
        base = max(b for b in self.allocations if b <= address)
        length, has_handle = self.allocations[base]
        assert address < base + length
        return base, length, has_handle

    def use(self) -> None:
        self.calls.append("use")

    def export(self, address: int) -> bytes:
        assert self.allocations[address][1]
        return address.to_bytes(64, "little")

    def export_descriptor(self, address: int) -> int:
        if address in self.refused:
            raise CudaError("cuMemExportToShareableHandle", 801, "not supported")
        assert not self.allocations[address][1]
        return address


def driver(refused: int = 0) -> Driver:
    found = {PLAIN: (4 * MIB, True), PLAIN + 4 * MIB: (4 * MIB, True), FAR: (2 * MIB, False)}
    virtual = {FIRST: (2 * MIB, False), SECOND: (2 * MIB, False), THIRD: (4 * MIB, False)}
    return Driver(found | virtual, frozenset([refused]))


def storage(address: int, length: int) -> Storage:
    return Storage("cuda", 0, address, length)


def test_each_allocation_with_a_handle_is_a_memory_of_its_own_and_named_once() -> None:
    storages = [storage(PLAIN + MIB, MIB), storage(PLAIN + 2 * MIB, MIB), storage(PLAIN + 4 * MIB, 4 * MIB)]

    assert memories_of(storages, driver().allocation) == [
        Memory(PLAIN, (4 * MIB,), True),
        Memory(PLAIN + 4 * MIB, (4 * MIB,), True),
    ]


def test_pieces_of_virtual_memory_that_touch_are_one_memory() -> None:
    storages = [storage(FIRST + MIB, 2 * MIB), storage(THIRD, MIB), storage(FAR, MIB)]

    assert memories_of(storages, driver().allocation) == [
        Memory(FIRST, (2 * MIB, 2 * MIB, 4 * MIB), False),
        Memory(FAR, (2 * MIB,), False),
    ]


def layout(*planes: tuple[int, int]) -> Layout:
    made = [
        Plane(name=str(n), storage=s, offset=offset, stride=64, block_bytes=32, packing="p")
        for n, (s, offset) in enumerate(planes)
    ]
    return Layout(planes=tuple(made), blocks=8, block_tokens=16)


def test_planes_are_told_by_the_memory_that_they_lie_in() -> None:
    storages = [storage(PLAIN + MIB, MIB), storage(SECOND, 3 * MIB)]
    cache = CudaCache(driver(), [layout((0, 128), (1, 256)), layout((1, 0))], storages)  # type: ignore[arg-type]
    cache.fit([4, 2])

    first, second = cache.export().groups

    assert first.planes == (CachePlane(0, MIB + 128, 64, 32), CachePlane(1, 256, 64, 32))
    assert (first.blocks, first.blocks_per_chunk, second.blocks_per_chunk) == (8, 4, 2)
    assert second.planes == (CachePlane(1, 0, 64, 32),)
    assert list(cache.pieces()) == [
        (Piece(memory=0, length=4 * MIB, handle=PLAIN.to_bytes(64, "little")), -1),
        (Piece(memory=1, length=2 * MIB), SECOND),
        (Piece(memory=1, length=4 * MIB), THIRD),
    ]


def test_memory_that_was_not_made_to_be_shared_is_refused_by_name() -> None:
    cache = CudaCache(driver(refused=SECOND), [layout((0, 0))], [storage(SECOND, MIB)])  # type: ignore[arg-type]

    with pytest.raises(LayoutError, match=r"cannot be exported: cuMemExportToShareableHandle: not supported"):
        list(cache.pieces())
