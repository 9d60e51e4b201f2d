# SPDX-License-Identifier: Apache-2.0
"""Which devices this machine has, by NVML: without a CUDA context, so without memory on any device."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Gpu", "InventoryError", "visible_gpus"]

_TEXT_BYTES: Final = 96
_NOT_SUPPORTED: Final = 3


class InventoryError(RuntimeError):
    """There is no NVIDIA driver, or it does not answer; the text says what."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device."""

    uuid: str
    """As NVML writes it: ``GPU-`` and five groups of hex digits."""

    name: str
    memory_bytes: int
    free_bytes: int
    mig: bool
    """True if it is cut into instances, whose memory handles cannot be shared."""


def visible_gpus(library: Any = None) -> tuple[Gpu, ...]:
    """Return the devices that this process may use.

    Args:
        library: NVML; loaded if not given.

    Raises:
        InventoryError: there is no driver here, or it fails.
    """
    nvml = library if library is not None else _load()
    with _started(nvml):
        count = c_uint()
        _check(nvml, nvml.nvmlDeviceGetCount_v2(byref(count)))
        return tuple(_describe(nvml, index) for index in range(count.value))


def _load() -> Any:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as e:
        raise InventoryError(f"no NVIDIA driver is visible: {e}") from e


@contextmanager
def _started(nvml: Any) -> Iterator[None]:
    _check(nvml, nvml.nvmlInit_v2())
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _describe(nvml: Any, index: int) -> Gpu:
    device, memory, mig, pending = c_void_p(), _Memory(), c_uint(), c_uint()
    _check(nvml, nvml.nvmlDeviceGetHandleByIndex_v2(index, byref(device)))
    _check(nvml, nvml.nvmlDeviceGetMemoryInfo(device, byref(memory)))
    code = nvml.nvmlDeviceGetMigMode(device, byref(mig), byref(pending))
    if code != _NOT_SUPPORTED:
        _check(nvml, code)
    return Gpu(
        uuid=_text(nvml, nvml.nvmlDeviceGetUUID, device),
        name=_text(nvml, nvml.nvmlDeviceGetName, device),
        memory_bytes=memory.total,
        free_bytes=memory.free,
        mig=bool(mig.value),
    )


def _text(nvml: Any, function: Any, device: c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    _check(nvml, function(device, buffer, _TEXT_BYTES))
    return buffer.value.decode()


def _check(nvml: Any, code: int) -> None:
    if code:
        nvml.nvmlErrorString.restype = c_char_p
        text = nvml.nvmlErrorString(code)
        raise InventoryError(f"NVML: {text.decode() if text else code}")
