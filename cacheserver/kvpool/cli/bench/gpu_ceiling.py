# SPDX-License-Identifier: Apache-2.0
"""How fast the link can copy at best: plain copies of 1 GiB between the device and registered shared memory."""

import mmap
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from kvpool.transfer.cuda import Context

__all__ = ["ceilings"]

_GIB: Final = 1 << 30
_ROUNDS: Final = 24
_WARM: Final = 2
_THREADS: Final = 8


def ceilings(memory: str) -> dict[str, float]:
    """Return GB/s out of the device (``store``), into it (``load``), and of both at once (``both``).

    Args:
        memory: folder on a tmpfs.
    """
    context = Context.current()
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        hosts = [_shared(Path(folder) / str(n)) for n in range(2)]
        for host in hosts:
            context.register(host.ctypes.data, _GIB)
        device = [context.allocate(_GIB) for _ in range(2)]
        streams = [context.stream(urgent=False) for _ in range(2)]
        try:
            return _measured(context, [h.ctypes.data for h in hosts], device, streams)
        finally:
            for host in hosts:
                context.unregister(host.ctypes.data)
            for address in device:
                context.free(address)
            for stream in streams:
                context.drop_stream(stream)


def _shared(path: Path) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    with path.open("wb+") as file:
        file.truncate(_GIB)
        view = np.frombuffer(mmap.mmap(file.fileno(), _GIB), dtype=np.uint8)
    step = _GIB // _THREADS
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda n: view[n * step : (n + 1) * step].fill(1), range(_THREADS)))
    return view


def _measured(context: Context, hosts: list[int], device: list[int], streams: list[int]) -> dict[str, float]:
    def out() -> None:
        context.copy_out(hosts[0], device[0], _GIB, streams[0])

    def into() -> None:
        context.copy_in(device[1], hosts[1], _GIB, streams[1])

    found = {}
    for name, calls in (("store", [out]), ("load", [into]), ("both", [out, into])):
        began_s = 0.0
        for rounds in (_WARM, _ROUNDS):
            began_s = time.monotonic()
            for _ in range(rounds):
                for call in calls:
                    call()
            for stream in streams:
                context.wait_stream(stream)
        found[name] = _ROUNDS * len(calls) * _GIB / (time.monotonic() - began_s) / 1e9
    return found
