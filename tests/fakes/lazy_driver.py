# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N802, N815 - names are those of the driver
"""A CUDA driver over host memory that does nothing before it has to: as late as a real one may.

What is put into a stream runs when somebody waits for it, or for an event behind it; a stream that waits for an event
lets the other one run up to there. So a missing order shows as wrong bytes.
"""

import ctypes
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.fakes.mapped_device import map_files, mapped, move

from kvpool.transfer.plan import PlaneTable

UUID = bytes(16)
NOT_SUPPORTED = 801


def is_mapped(address: int) -> bool:
    ends = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ends)


class LazyDriver(dict[str, Callable[..., int]]):
    """Stands for ``cuda._driver()``."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self._memory: list[np.ndarray] = []
        self._queued: dict[int, list[Callable[[], object]]] = defaultdict(list)
        self._done: dict[int, int] = defaultdict(int)
        self._events: dict[int, tuple[int, int]] = {}
        self.ran: list[str] = []
        self.registered: dict[int, int] = {}
        """Flags by address."""

        self.refused = 0
        """Flags that no registration may have."""

    def __missing__(self, name: str) -> Callable[..., int]:
        known = getattr(self, name, None)

        def call(*arguments: Any) -> int:
            return (known(*arguments) or 0) if known is not None else 0

        self[name] = call
        return call

    # --- what takes its time ---------------------------------------------------------------------------------------

    def put(self, stream: int, name: str, do: Callable[[], object]) -> None:
        self._queued[stream].append(lambda: (self.ran.append(name), do()))

    def run(self, stream: int, end: int) -> None:
        while self._done[stream] < end:
            self._done[stream] += 1
            self._queued[stream][self._done[stream] - 1]()

    def cuMemcpyHtoDAsync_v2(self, device: int, host: int, length: int, stream: int) -> None:
        self.put(stream, "in", lambda: ctypes.memmove(device, host, length))

    def cuMemcpyDtoHAsync_v2(self, host: int, device: int, length: int, stream: int) -> None:
        self.put(stream, "out", lambda: ctypes.memmove(host, device, length))

    def cuEventRecord(self, event: int, stream: int) -> None:
        self._events[event] = (stream, len(self._queued[stream]))

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        del flags
        there = self._events.get(event, (0, 0))
        self.put(stream, "after", lambda: self.run(*there))

    def cuEventSynchronize(self, event: int) -> None:
        self.run(*self._events.get(event, (0, 0)))

    def cuStreamSynchronize(self, stream: int) -> None:
        self.run(stream, len(self._queued[stream]))

    # --- what is registered ----------------------------------------------------------------------------------------

    def cuMemHostRegister_v2(self, address: int, length: int, flags: int) -> int:
        assert length > 0
        if flags & self.refused:
            return NOT_SUPPORTED
        assert address not in self.registered
        self.registered[address] = flags
        return 0

    def cuMemHostUnregister(self, address: int) -> None:
        del self.registered[address]
        assert is_mapped(address), "it has to be there until it is unregistered"

    # --- what is made ----------------------------------------------------------------------------------------------

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = 1

    def cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: int) -> None:
        del flags, priority
        stream._obj.value = next(self._numbers)

    def cuEventCreate(self, event: Any, flags: int) -> None:
        del flags
        event._obj.value = next(self._numbers)

    def cuMemAlloc_v2(self, address: Any, length: int) -> None:
        self._memory.append(np.full(length, 0xEE, dtype=np.uint8))
        address._obj.value = self._memory[-1].ctypes.data

    cuMemAllocHost_v2 = cuMemAlloc_v2

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> None:
        del flags
        address._obj.value = int.from_bytes(bytes(handle.reserved)[:8], "little")

    def cuMemAddressReserve(self, address: Any, length: int, *_: int) -> None:
        address._obj.value = map_files([(-1, length)])

    def cuMemImportFromShareableHandle(self, piece: Any, descriptor: int, kind: int) -> None:
        assert kind == 1
        piece._obj.value = descriptor

    def cuMemMap(self, address: int, length: int, offset: int, piece: int, flags: int) -> None:
        assert (offset, flags) == (0, 0)
        mapped(address, length, piece)


class LazyKernel:
    """Stands for ``mover.kernel.MoveKernel``."""

    driver: LazyDriver

    def __init__(self, table: PlaneTable) -> None:
        self._word = table.word_bytes

    def launch(self, arguments: Sequence[int], stream: int, *, scatter: bool) -> None:
        numbers = tuple(arguments)
        name = "scatter" if scatter else "gather"
        self.driver.put(stream, name, lambda: move(numbers, self._word, scatter=scatter))
