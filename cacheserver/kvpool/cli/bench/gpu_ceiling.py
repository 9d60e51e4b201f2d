# SPDX-License-Identifier: Apache-2.0
"""How fast the link can copy at best: plain copies of 1 GiB between the device and registered shared memory."""

import mmap
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

import numpy as np

from kvpool.cli.bench.gpu_rig import WAYS
from kvpool.transfer.cuda import Context

__all__ = ["Link", "ceilings"]

_GIB: Final = 1 << 30
_ROUNDS: Final = 24
_WARM: Final = 2
_THREADS: Final = 8


class Link:
    """The link of the device that is current in this thread; a context manager, which has 2 GiB at either end."""

    def __init__(self, memory: str) -> None:
        """Take nothing yet.

        Args:
            memory: folder on a tmpfs.
        """
        self._memory = memory
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Take the memory.

        Raises:
            CudaError: there is too little on the device, or the host's cannot be registered.
        """
        context = self._context = Context.current()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._memory)))
            self._hosts = [_shared(folder / str(n)) for n in range(2)]
            self._device: list[int] = []
            self._streams: list[int] = []
            for host in self._hosts:
                context.register(host.ctypes.data, _GIB)
                stack.callback(context.unregister, host.ctypes.data)
                self._device.append(context.allocate(_GIB))
                stack.callback(context.free, self._device[-1])
                self._streams.append(context.stream(urgent=False))
                stack.callback(context.drop_stream, self._streams[-1])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._stack.close()

    def copy(self, way: str) -> tuple[int, float, float]:
        """Copy for some tenths of a second; returns how many bytes, and when that began and ended."""
        calls = [call for call, wanted in zip((self._out, self._into), WAYS[way], strict=True) if wanted]
        began_s = 0.0
        for rounds in (_WARM, _ROUNDS):
            began_s = time.monotonic()
            for _ in range(rounds):
                for call in calls:
                    call()
            for stream in self._streams:
                self._context.wait_stream(stream)
        return _ROUNDS * len(calls) * _GIB, began_s, time.monotonic()

    def _out(self) -> None:
        self._context.copy_out(self._hosts[0].ctypes.data, self._device[0], _GIB, self._streams[0])

    def _into(self) -> None:
        self._context.copy_in(self._device[1], self._hosts[1].ctypes.data, _GIB, self._streams[1])


def ceilings(memory: str) -> dict[str, float]:
    """Return GB/s out of the device (``store``), into it (``load``), and of both at once (``both``).

    Args:
        memory: folder on a tmpfs.
    """
    found = {}
    with Link(memory) as link:
        for way in WAYS:
            copied, began_s, ended_s = link.copy(way)
            found[way] = copied / (ended_s - began_s) / 1e9
    return found


def _shared(path: Path) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    with path.open("wb+") as file:
        file.truncate(_GIB)
        view = np.frombuffer(mmap.mmap(file.fileno(), _GIB), dtype=np.uint8)
    step = _GIB // _THREADS
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda n: view[n * step : (n + 1) * step].fill(1), range(_THREADS)))
    return view
