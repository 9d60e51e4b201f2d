# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002, N802
"""The device inventory over an NVML of the test's own."""

from typing import Any

import pytest

from kvpool.transfer.cuda import CudaError, uuid_text
from kvpool.transfer.mover.inventory import InventoryError, visible_gpus


class Nvml:
    """Two devices, the second one cut into instances."""

    def __init__(self, *, mig_code: int = 0, init_code: int = 0) -> None:
        self.mig_code, self.init_code = mig_code, init_code
        self.started = 0
        self.nvmlErrorString = lambda _code: b"not today"

    def nvmlInit_v2(self) -> int:
        self.started += not self.init_code
        return self.init_code

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = 100 + index
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 1000 * device.value, 10
        return 0

    def nvmlDeviceGetMigMode(self, device: Any, mig: Any, pending: Any) -> int:
        mig._obj.value = device.value == 101
        return self.mig_code

    def nvmlDeviceGetUUID(self, device: Any, buffer: Any, size: int) -> int:
        buffer.value = f"GPU-{device.value}".encode()
        return 0

    def nvmlDeviceGetName(self, device: Any, buffer: Any, size: int) -> int:
        buffer.value = b"NVIDIA H200"
        return 0


def test_devices_are_named_by_uuid() -> None:
    nvml = Nvml()

    gpus = visible_gpus(nvml)

    assert [(g.uuid, g.name, g.memory_bytes, g.free_bytes, g.mig) for g in gpus] == [
        ("GPU-100", "NVIDIA H200", 100_000, 10, False),
        ("GPU-101", "NVIDIA H200", 101_000, 10, True),
    ]
    assert nvml.started == 0


def test_a_device_that_knows_no_instances_has_none() -> None:
    assert [g.mig for g in visible_gpus(Nvml(mig_code=3))] == [False, True]


@pytest.mark.parametrize("nvml", [Nvml(init_code=9), Nvml(mig_code=5)])
def test_a_failure_says_what_the_driver_says(nvml: Nvml) -> None:
    with pytest.raises(InventoryError, match="not today"):
        visible_gpus(nvml)
    assert nvml.started == 0


def test_a_uuid_reads_as_the_driver_writes_it() -> None:
    assert uuid_text(bytes(range(16))) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def test_an_error_of_the_driver_names_the_call() -> None:
    assert (
        str(CudaError("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY")) == "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"
    )
