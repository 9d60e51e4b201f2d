# SPDX-License-Identifier: Apache-2.0
"""The kernel in CUDA C++ through CuPy, for the mover's mapped mode: ``kernels.move`` again, over the same table."""

from collections.abc import Sequence
from typing import Final

import cupy

from kvpool.transfer.cuda import Kernel
from kvpool.transfer.plan import PlaneTable

__all__ = ["MoveKernel"]

_THREADS: Final = 128
_PROGRAMS: Final = 528
_PARAMETERS: Final = 10
_TYPES: Final = {16: "uint4", 8: "unsigned long long", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}

_SOURCE: Final = r"""
typedef long long number;

// Parameters: see kernels/move.py. word: bytes that column 5 of the table counts in.
template <typename W, bool SCATTER>
__global__ void move(const number* table, const number* ids, char* slot, number total, number pieces, number blocks,
                     number step, number whole, number base, number word) {
  for (number at = blockIdx.x; at < total; at += gridDim.x) {
    const number block = at % blocks, chunk = at / (blocks * pieces);
    const number* row = table + at / blocks % pieces * 6;
    const number id = ids[chunk * whole + block];
    W* cache = reinterpret_cast<W*>(row[0] + id * row[1]);
    W* ring = reinterpret_cast<W*>(slot + chunk * step + (row[2] - base) * whole + block * row[3] + row[4]);
    const number words = row[5] * word / sizeof(W);
    for (number i = threadIdx.x; i < words; i += blockDim.x) {
      if (!SCATTER) ring[i] = id >= 0 ? cache[i] : W{};
      else if (id >= 0) cache[i] = ring[i];
    }
  }
}
"""


class MoveKernel:
    """Gather and scatter for one layout, compiled for the current device. Each of both is used by one thread."""

    def __init__(self, table: PlaneTable) -> None:
        """Compile; a second the first time, then CuPy's cache."""
        self._word = table.word_bytes
        names = [f"move<{_TYPES[table.unit]}, {flag}>" for flag in ("false", "true")]
        module = cupy.RawModule(code=_SOURCE, options=("-std=c++17",), name_expressions=names)
        functions = [module.get_function(name).kernel for name in names]
        self._module = module  # the functions go with it
        self._kernels = [Kernel(function.ptr, _THREADS, 0, _PARAMETERS) for function in functions]

    def launch(self, arguments: Sequence[int], stream: int, *, scatter: bool) -> None:
        """Put a launch into a stream of the driver's; *arguments* as for ``kernels.move``."""
        programs = min(_PROGRAMS, max(1, arguments[3]))
        self._kernels[scatter].launch(programs, (*arguments, self._word), stream)
