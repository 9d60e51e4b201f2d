# SPDX-License-Identifier: Apache-2.0
"""Names of the NVIDIA GPUs, through NVML if the driver brought it: no CUDA context, no package."""

import ctypes

__all__ = ["gpu_names"]

NAME_BYTES = 96


def gpu_names() -> tuple[str, ...]:
    """Return the names of all GPUs that this process may see; empty without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return tuple(_name(nvml, i) for i in range(count.value))
    finally:
        nvml.nvmlShutdown()


def _name(nvml: ctypes.CDLL, index: int) -> str:
    device, name = ctypes.c_void_p(), ctypes.create_string_buffer(NAME_BYTES)
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return f"GPU {index} (no access)"
    nvml.nvmlDeviceGetName(device, name, NAME_BYTES)
    return name.value.decode(errors="replace")
