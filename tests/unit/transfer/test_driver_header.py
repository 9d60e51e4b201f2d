# SPDX-License-Identifier: Apache-2.0
"""What is called over ctypes, against the driver's own header: numbers of flags, and how many parameters there are.

The tests' drivers are written by whoever wrote the calls, and would share their mistakes.
"""

import re
from importlib.metadata import files

import pytest

from kvpool.transfer import cuda

NUMBERS = {
    "HANDLE_BYTES": "CU_IPC_HANDLE_SIZE",
    "_DESCRIPTOR": "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    "_INVALID_DEVICE": "CUDA_ERROR_INVALID_DEVICE",
    "_IS_LEGACY_IPC": "CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE",
    "_LAZY_PEER": "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS",
    "_NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
    "_ON_DEVICE": "CU_MEM_LOCATION_TYPE_DEVICE",
    "_PINNED": "CU_MEM_ALLOCATION_TYPE_PINNED",
    "_READ_ONLY": "CU_MEMHOSTREGISTER_READ_ONLY",
    "_READ_WRITE": "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
    "_RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
    "_UNTIMED": "CU_EVENT_DISABLE_TIMING",
}
OF_OUR_OWN = {"UUID_BYTES", "_PARAMETER_BYTES", "_SPARE_PARAMETERS"}


@pytest.fixture(scope="module")
def header() -> str:
    (path,) = [f for f in files("nvidia-cuda-runtime") if f.name == "cuda.h"]
    text = path.locate().read_text()
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def test_every_number_has_a_name_in_the_header() -> None:
    numbers = {name for name, value in vars(cuda).items() if name.lstrip("_").isupper() and isinstance(value, int)}

    assert numbers == NUMBERS.keys() | OF_OUR_OWN


@pytest.mark.parametrize("ours", NUMBERS)
def test_numbers_are_those_of_the_header(header: str, ours: str) -> None:
    found = re.search(rf"\b{NUMBERS[ours]}\s*=?\s*(0x[0-9a-fA-F]+|\d+)", header)

    assert found is not None
    assert getattr(cuda, ours) == int(found[1], 0)


@pytest.mark.parametrize("name", cuda._SIGNATURES)
def test_calls_have_as_many_parameters_as_the_header_says(header: str, name: str) -> None:
    found = re.search(rf"CUresult\s+CUDAAPI\s+{name.removesuffix('_v2')}\s*\(([^)]*)\)\s*;", header)

    assert found is not None
    assert len(cuda._SIGNATURES[name]) == len(found[1].split(","))
