# SPDX-License-Identifier: Apache-2.0
"""The mover's kernel for mode mapped: ``kernels.move`` again, over the same table, as PTX that the driver compiles."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from kvpool.transfer.cuda import Kernel, made
from kvpool.transfer.plan import PlaneTable

__all__ = ["MoveKernel"]

_THREADS: Final = 128
_PROGRAMS: Final = 528
_PARAMETERS: Final = 10


class MoveKernel:
    """Gather and scatter for one layout, on the current device. Each of both is used by one thread."""

    def __init__(self, table: PlaneTable) -> None:
        """Take those that move words of the table's unit.

        Raises:
            CudaError: the driver cannot compile them for its device.
        """
        self._word = table.word_bytes
        names = [f"{way}_{table.unit}".encode() for way in ("gather", "scatter")]
        functions = [made("cuModuleGetFunction", _module(), name) for name in names]
        self._kernels = [Kernel(function, _THREADS, 0, _PARAMETERS) for function in functions]

    def launch(self, arguments: Sequence[int], stream: int, *, scatter: bool) -> None:
        """Put a launch into a stream of the driver's; *arguments* as for ``kernels.move``."""
        programs = min(_PROGRAMS, max(1, arguments[3]))
        self._kernels[scatter].launch(programs, (*arguments, self._word), stream)


@cache
def _module() -> int:
    """Compile them all, once: a mover has one device."""
    return made("cuModuleLoadData", Path(__file__).with_suffix(".ptx").read_bytes())
