# SPDX-License-Identifier: Apache-2.0
"""An engine whose device is the driver of the tests: its blocks go through a stage, copies reach what is locked."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tests.fakes.blocks import POISON, StagedNumpyBlocks
from tests.fakes.clients import BLOCK_BYTES, FakeEngine
from tests.fakes.lazy_driver import LazyDriver
from tests.fakes.mapped_device import move

from kvpool.client.worker import WorkerAdapter
from kvpool.transfer import cuda
from kvpool.transfer.plan import PlaneTable
from kvpool.transfer.planes import Layout, Plane

_OF_TRITON = tuple(f"kvpool.transfer.kernels.{name}" for name in ("move", "groups", "paged", "staged"))


class _Kernel:
    """Stands for ``cuda.Kernel``."""

    def __init__(self, driver: LazyDriver, table: PlaneTable, *, scatter: bool) -> None:
        self._driver, self._word, self._scatter = driver, table.word_bytes, scatter

    def launch(self, programs: int, arguments: Sequence[int], stream: int) -> None:
        assert programs > 0
        name = "scatter" if self._scatter else "gather"
        self._driver.put(stream, name, lambda: move(tuple(arguments), self._word, scatter=self._scatter))


@contextmanager
def staging() -> Iterator[tuple[LazyDriver, Any]]:
    """Give the driver of the tests, and what makes ``StagedBlocks`` of layouts, addresses and a stage's bytes."""
    driver, real = LazyDriver(), cuda._driver
    before = {name: sys.modules.pop(name, None) for name in _OF_TRITON}
    stub = ModuleType("move")
    stub.compiled = lambda table, *, scatter: (_Kernel(driver, table, scatter=scatter), 1)  # type: ignore[attr-defined]
    sys.modules[_OF_TRITON[0]] = stub
    cuda._driver = lambda: driver  # type: ignore[assignment]
    try:
        from kvpool.transfer.kernels.groups import PagedGroup, prepare
        from kvpool.transfer.kernels.staged import StagedBlocks

        def make(layouts: Sequence[Layout], addresses: Sequence[int], stage_bytes: int) -> StagedBlocks:
            context = cuda.Context(0, 1)
            groups = prepare(context, [PagedGroup(layout, addresses) for layout in layouts])
            return StagedBlocks(context, groups, stage_bytes)

        yield driver, make
    finally:
        cuda._driver = real
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


class StagedEngine(FakeEngine):
    """See FakeEngine; *make* is that of ``staging``. No chunk's size is a multiple of the stage's halves."""

    def __init__(self, address, *modes, make, blocks=256, block_bytes=BLOCK_BYTES, **options) -> None:
        super().__init__(address, *modes, blocks=blocks, block_bytes=block_bytes, **options)
        self.worker.close(1.0)
        self.blocks = StagedNumpyBlocks(blocks, block_bytes)
        self.blocks.memory[:] = POISON
        plane = Plane(name="l", storage=0, offset=0, stride=block_bytes, block_bytes=block_bytes, packing="p")
        layout = Layout(planes=(plane,), blocks=blocks, block_tokens=2)
        self.blocks.staged = make([layout], [self.blocks.memory.ctypes.data], 3 * block_bytes)
        self.worker = WorkerAdapter(self.worker_link, self.blocks, self.config)
