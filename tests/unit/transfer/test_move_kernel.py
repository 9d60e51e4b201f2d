# SPDX-License-Identifier: Apache-2.0
"""The mover's kernel as a file: it is of its source, and the driver is asked for what is in it."""

import ctypes
import re
import subprocess
import sys
from typing import Any

import pytest
from tests.architecture.source import ROOT
from tests.fakes.lazy_driver import LazyDriver
from tools import kernels

from kvpool.transfer import cuda
from kvpool.transfer.mover import kernel
from kvpool.transfer.plan import plane_table
from kvpool.transfer.planes import Layout, Plane

ENTRIES = re.findall(r"\.visible \.entry (\w+)\((.*?)\)", kernels.PTX.read_text(), flags=re.DOTALL)


def test_the_compiled_file_is_of_this_source() -> None:
    assert kernels.stamp() in kernels.PTX.read_text(), "run `python -m tools.kernels`"


def test_it_is_what_the_compiler_makes_of_it() -> None:
    # In a process of its own: the compiler changes the locale.
    done = subprocess.run(
        [sys.executable, "-m", "tools.kernels", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if "is not installed" in done.stderr:
        pytest.skip(done.stderr)

    assert done.returncode == 0, done.stderr


def test_a_kernel_has_ten_numbers_of_64_bits() -> None:
    assert [re.findall(r"\.param \.(\w+)", parameters) for _, parameters in ENTRIES] == [["u64"] * 10] * 10


class Driver(LazyDriver):
    """Has the kernels of what was loaded, by the place of their names."""

    loaded: list[bytes]
    launched: list[tuple[int, int, list[int]]]

    def cuModuleLoadData(self, module: Any, image: bytes) -> None:  # noqa: N802
        self.loaded.append(image)
        module._obj.value = 7

    def cuModuleGetFunction(self, function: Any, module: int, name: bytes) -> None:  # noqa: N802
        assert module == 7
        function._obj.value = [entry for entry, _ in ENTRIES].index(name.decode())

    def cuLaunchKernel(self, function: Any, programs: int, *rest: Any) -> None:  # noqa: N802
        places = rest[-2]
        numbers = [ctypes.c_int64.from_address(place).value for place in places[:10]]
        self.launched.append((function.value or 0, programs, numbers))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    made.loaded, made.launched = [], []
    monkeypatch.setattr(cuda, "_driver", lambda: made)
    kernel._module.cache_clear()
    return made


@pytest.mark.parametrize(("block_bytes", "word"), [(4096, 8), (24, 8), (12, 4), (6, 2), (5, 1)])
def test_words_are_as_wide_as_all_addresses_and_lengths_allow(driver: Driver, block_bytes: int, word: int) -> None:
    plane = Plane(name="p", storage=0, offset=0, stride=block_bytes, block_bytes=block_bytes, packing="p")
    table = plane_table(Layout(planes=(plane,), blocks=4, block_tokens=16), [1 << 20])
    made, again = kernel.MoveKernel(table), kernel.MoveKernel(table)

    made.launch((1, 2, 3, 4000, 5, 6, 7, 8, 9), 0, scatter=False)
    again.launch((1, 2, 3, 4, 5, 6, 7, 8, 9), 0, scatter=True)

    assert [(ENTRIES[number][0], programs) for number, programs, _ in driver.launched] == [
        (f"gather_{table.unit}", 528),
        (f"scatter_{table.unit}", 4),
    ]
    assert table.word_bytes == word
    assert driver.launched[1][2] == [1, 2, 3, 4, 5, 6, 7, 8, 9, word]
    assert driver.loaded == [kernels.PTX.read_bytes()], "compiled once for all groups"
