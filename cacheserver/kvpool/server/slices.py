# SPDX-License-Identifier: Apache-2.0
"""Short time slices: on a busy node the loop's thread is put aside for a moment, and not for a whole slice of others.

Linux's scheduler (EEVDF, since 6.12) lets a task ask for a slice of its own: it gets no more of the processor, but
sooner and more often. On two cores with three clients at full speed, pings then wait half as long at worst. Older
kernels take no notice. It needs no right.
"""

import ctypes
import platform
from typing import Final

__all__ = ["SLICE_S", "Attributes", "ask_for_short_slices", "attributes_of_this_thread"]

SLICE_S: Final = 0.0001
"""The shortest that the kernel takes; a request takes about as long."""

_CALLS: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Numbers of sched_setattr and sched_getattr, which libc has no functions for."""
_SCHED_OTHER: Final = 0


class Attributes(ctypes.Structure):
    """``struct sched_attr``, as far as every kernel knows it."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def ask_for_short_slices() -> bool:
    """Ask for this thread and all that it starts; returns False where that is not to be had."""
    attributes = attributes_of_this_thread()
    if attributes is None or attributes.policy != _SCHED_OTHER:
        return False
    attributes.runtime_ns = int(SLICE_S * 1e9)
    number = _CALLS[platform.machine()][0]
    return not ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attributes), 0)


def attributes_of_this_thread() -> Attributes | None:
    """Return how the kernel schedules this thread; None where it cannot be asked."""
    if platform.machine() not in _CALLS:
        return None
    attributes = Attributes()
    size = ctypes.sizeof(attributes)
    number = _CALLS[platform.machine()][1]
    failed = ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attributes), size, 0)
    attributes.size = size
    return None if failed else attributes
