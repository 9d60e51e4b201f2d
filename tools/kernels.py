# SPDX-License-Identifier: Apache-2.0
"""Compile the mover's kernel to PTX: ``python -m tools.kernels``.

It needs no GPU, but NVIDIA's compiler as a wheel:

    pip install 'nvidia-cuda-nvrtc-cu12<12.1'

An old compiler on purpose: a driver takes PTX of its own version and of older ones, for its own devices and newer ones.
"""

import argparse
import ctypes
import hashlib
import importlib.util
import sys
from ctypes import byref, c_char_p, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Final

__all__ = ["PTX", "SOURCE", "CompilerError", "compiled", "main", "stamp"]

FOLDER: Final = Path(__file__).resolve().parents[1] / "cacheserver" / "kvpool" / "transfer" / "mover"
SOURCE: Final = FOLDER / "kernel.cu"
PTX: Final = FOLDER / "kernel.ptx"
_LIBRARY: Final = "libnvrtc.so.12"
_OPTIONS: Final = (b"--gpu-architecture=compute_70", b"--std=c++17")


class CompilerError(RuntimeError):
    """There is no compiler, or it refuses the source."""


def stamp() -> str:
    """Return the line by which a compiled file says what it is made of."""
    return f"// Made by tools/kernels.py of kernel.cu, sha256 {hashlib.sha256(SOURCE.read_bytes()).hexdigest()}\n"


def compiled() -> str:
    """Return the PTX of the source, with its stamp.

    Raises:
        CompilerError: see there.
    """
    library = _compiler()
    program = c_void_p()
    _check(library.nvrtcCreateProgram(byref(program), SOURCE.read_bytes(), SOURCE.name.encode(), 0, None, None))
    failed = library.nvrtcCompileProgram(program, len(_OPTIONS), (c_char_p * len(_OPTIONS))(*_OPTIONS))
    if failed:
        raise CompilerError(_text(library, "ProgramLog", program))
    lines = _text(library, "PTX", program).splitlines()
    return "".join(["// SPDX-License-Identifier: Apache-2.0\n", stamp(), *(f"{line.rstrip()}\n" for line in lines)])


def _compiler() -> Any:
    try:
        package = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        package = None
    for folder in (package.submodule_search_locations or ()) if package else ():
        library = Path(folder) / "lib" / _LIBRARY
        if library.exists():
            return ctypes.CDLL(str(library))
    raise CompilerError(f"{_LIBRARY} is not installed: pip install 'nvidia-cuda-nvrtc-cu12<12.1'")


def _text(library: Any, what: str, program: c_void_p) -> str:
    size = c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, text))
    return text.value.decode()


def _check(code: int) -> None:
    if code:
        raise CompilerError(f"the compiler failed with {code}")


def main() -> int:
    """Write the file, or with --check return 1 if it is stale; 2 with the reason if it cannot be made."""
    parser = argparse.ArgumentParser(description="Compile the mover's kernel to PTX.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is stale")
    check = parser.parse_args().check
    try:
        made = compiled()
        if check:
            return int(PTX.read_text() != made)
        PTX.write_text(made)
    except CompilerError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
