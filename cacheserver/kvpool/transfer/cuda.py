# SPDX-License-Identifier: Apache-2.0
"""The few calls of the CUDA driver that moving blocks needs, over ctypes: no runtime, no extension, no torch.

The driver's library is the one that every CUDA program of a process shares, whatever built it, so nothing here depends
on the engine's torch. Handles are plain integers.

Calls give the interpreter's lock away, but for the three that a launch is made of: they only queue, for 1 to 6
microseconds, and to get the lock back from an engine that computes in Python can take 5 milliseconds each time.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, Final

__all__ = ["HANDLE_BYTES", "UUID_BYTES", "Context", "CudaError", "Kernel", "made", "uuid_text"]

HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16

_INVALID_DEVICE: Final = 101
_UNTIMED: Final = 2

_NON_BLOCKING: Final = 1
_RELAXED: Final = 2
_LAZY_PEER: Final = 1
_READ_ONLY: Final = 8
_IS_LEGACY_IPC: Final = 10
_DESCRIPTOR: Final = 1
_ON_DEVICE: Final = 1
_PINNED: Final = 1
_READ_WRITE: Final = 3
_PARAMETER_BYTES: Final = 8
_SPARE_PARAMETERS: Final = 4

_Handle = ctypes.c_ubyte * HANDLE_BYTES


class _HandleStruct(ctypes.Structure):
    """Passed by value, as the driver declares it."""

    _fields_ = (("reserved", _Handle),)


class _Access(ctypes.Structure):
    """Who may do what with a mapping."""

    _fields_ = (("kind", c_int), ("device", c_int), ("access", c_int))


class _Kind(ctypes.Structure):
    """Which virtual memory is wanted; the driver's declaration ends with what is not used here."""

    _fields_ = (("kind", c_int), ("shared_by", c_int), ("place", c_int), ("device", c_int), ("rest", c_uint64 * 2))


_KEEPING_LOCK: Final = ("cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent")

_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxGetDevice": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuCtxGetStreamPriorityRange": (c_void_p, c_void_p),
    "cuMemGetInfo_v2": (c_void_p, c_void_p),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemAllocHost_v2": (c_void_p, c_size_t),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (c_void_p, _HandleStruct, c_uint),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
    "cuMemRetainAllocationHandle": (c_void_p, c_void_p),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (c_void_p, c_void_p, c_int),
    "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_uint64),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuMemRelease": (c_uint64,),
    "cuStreamCreateWithPriority": (c_void_p, c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_uint64, c_char_p),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, c_void_p),
}


class CudaError(RuntimeError):
    """A call of the driver failed, or there is no driver. After most of them the context is unusable."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


@cache
def _driver() -> dict[str, Any]:
    try:
        usual, keeping = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
    except OSError as e:
        raise CudaError("libcuda.so.1", -1, str(e)) from e
    functions = {}
    for name, types in _SIGNATURES.items():
        function = functions[name] = getattr(keeping if name in _KEEPING_LOCK else usual, name)
        function.argtypes, function.restype = types, c_int
    if code := functions["cuInit"](0):
        raise CudaError("cuInit", code, "the driver does not start")
    return functions


def _name(code: int) -> str:
    text = c_char_p()
    _driver()["cuGetErrorName"](code, byref(text))
    return (text.value or b"unknown error").decode()


def _call(name: str, *arguments: Any) -> None:
    if code := _driver()[name](*arguments):
        raise CudaError(name, code, _name(code))


def made(name: str, *arguments: Any) -> int:
    """Call what returns a handle or an address through its first parameter."""
    value = c_uint64(0)
    _call(name, byref(value), *arguments)
    return value.value


def _uuid(device: int) -> bytes:
    uuid = (ctypes.c_ubyte * UUID_BYTES)()
    _call("cuDeviceGetUuid_v2", byref(uuid), device)
    return bytes(uuid)


def uuid_text(uuid: bytes) -> str:
    """Return a device's UUID as people and NVML write it."""
    digits = uuid.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


class Context:
    """The primary context of one device: the one that torch and everything else in the process uses.

    A thread calls ``use`` (its own thread) or ``entered`` (an engine's thread) before any other method.
    """

    def __init__(self, device: int, handle: int) -> None:
        self._device = device
        self.handle = handle
        self.uuid = _uuid(device)

    @classmethod
    def current(cls) -> "Context":
        """Return the context that is current in this thread.

        Raises:
            CudaError: none is, or there is no driver.
        """
        handle = made("cuCtxGetCurrent")
        if not handle:
            raise CudaError("cuCtxGetCurrent", 0, "no context is current in this thread")
        device = c_int()
        _call("cuCtxGetDevice", byref(device))
        return cls(device.value, handle)

    @classmethod
    def of_uuid(cls, uuid: bytes) -> "Context":
        """Open the primary context of a device.

        Raises:
            CudaError: no such device is visible; those that are get named.
        """
        count = c_int()
        _call("cuDeviceGetCount", byref(count))
        seen = {}
        for ordinal in range(count.value):
            device = c_int()
            _call("cuDeviceGet", byref(device), ordinal)
            seen[_uuid(device.value)] = device.value
        if uuid not in seen:
            visible = ", ".join(map(uuid_text, seen)) or "none"
            text = f"{uuid_text(uuid)} is not visible here; visible: {visible}"
            raise CudaError("cuDeviceGet", _INVALID_DEVICE, text)
        return cls(seen[uuid], made("cuDevicePrimaryCtxRetain", seen[uuid]))

    def use(self) -> None:
        """Make the context current in this thread for good; to be called in threads of our own.

        What such a thread does never spoils a graph that another one captures, and is not refused meanwhile.
        """
        _call("cuCtxSetCurrent", self.handle)
        _call("cuThreadExchangeStreamCaptureMode", byref(c_int(_RELAXED)))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the context current in this thread, and afterwards what was current before."""
        _call("cuCtxPushCurrent_v2", self.handle)
        try:
            yield
        finally:
            made("cuCtxPopCurrent_v2")

    @contextmanager
    def apart(self) -> Iterator[None]:
        """As ``entered``, with what ``use`` says of captures: for threads that may be anybody's."""
        with self.entered():
            mode = c_int(_RELAXED)
            _call("cuThreadExchangeStreamCaptureMode", byref(mode))
            try:
                yield
            finally:
                _call("cuThreadExchangeStreamCaptureMode", byref(mode))

    def free_bytes(self) -> int:
        """Return the device's free memory."""
        free, total = c_size_t(), c_size_t()
        _call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def allocate(self, length: int) -> int:
        """Return the address of new device memory, which ``export`` can share."""
        return made("cuMemAlloc_v2", length)

    def free(self, address: int) -> None:
        """Free device memory; waits for whatever uses it."""
        _call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """Return a handle by which another process can open an allocation."""
        handle = _Handle()
        _call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def allocate_exported(self, length: int) -> tuple[int, bytes]:
        """Return the address of new device memory and its handle; nothing stays allocated if it cannot be exported.

        Raises:
            CudaError: out of memory, or the allocation cannot be exported.
        """
        address = self.allocate(length)
        try:
            return address, self.export(address)
        except CudaError:
            self.free(address)
            raise

    def open(self, handle: bytes) -> int:
        """Map another process's allocation, once for each handle, until this process ends."""
        return made("cuIpcOpenMemHandle_v2", _HandleStruct(_Handle.from_buffer_copy(handle)), _LAZY_PEER)

    def allocation(self, address: int) -> tuple[int, int, bool]:
        """Return the base and length of the allocation that an address lies in, and whether it has a handle.

        One without is virtual memory: its pieces, each of them an allocation, are exported as descriptors.
        """
        legacy, base, length = c_int(), c_uint64(), c_size_t()
        _call("cuPointerGetAttribute", byref(legacy), _IS_LEGACY_IPC, address)
        _call("cuMemGetAddressRange_v2", byref(base), byref(length), address)
        return base.value, length.value, bool(legacy.value)

    def export_descriptor(self, address: int) -> int:
        """Return a descriptor by which another process can map a piece of virtual memory; the caller closes it.

        Raises:
            CudaError: it was not allocated to be shared like this.
        """
        piece, descriptor = made("cuMemRetainAllocationHandle", address), c_int(-1)
        try:
            _call("cuMemExportToShareableHandle", byref(descriptor), piece, _DESCRIPTOR, 0)
        finally:
            _call("cuMemRelease", piece)
        return descriptor.value

    def create(self, length: int) -> int:
        """Return the address of new virtual memory, of some times 2 MiB, which ``export_descriptor`` can share."""
        kind = _Kind(_PINNED, _DESCRIPTOR, _ON_DEVICE, self._device)
        return self._mapped([(made("cuMemCreate", length, byref(kind), 0), length)])

    def map(self, pieces: Sequence[tuple[int, int]]) -> int:
        """Map pieces of another process's virtual memory (descriptor, length) one after the other, for good."""
        return self._mapped([(made("cuMemImportFromShareableHandle", d, _DESCRIPTOR), n) for d, n in pieces])

    def _mapped(self, pieces: Sequence[tuple[int, int]]) -> int:
        whole = sum(length for _, length in pieces)
        start = at = made("cuMemAddressReserve", whole, 0, 0, 0)
        for piece, length in pieces:
            _call("cuMemMap", at, length, 0, piece, 0)
            _call("cuMemRelease", piece)
            at += length
        _call("cuMemSetAccess", start, whole, byref(_Access(_ON_DEVICE, self._device, _READ_WRITE)), 1)
        return start

    def allocate_host(self, length: int) -> int:
        """Return the address of new page-locked host memory."""
        return made("cuMemAllocHost_v2", length)

    def free_host(self, address: int) -> None:
        """Free what ``allocate_host`` returned."""
        _call("cuMemFreeHost", address)

    def register(self, address: int, length: int, *, writable: bool = True) -> None:
        """Page-lock host memory so that copies to and from it run by themselves. 0.04 s/GiB once touched."""
        _call("cuMemHostRegister_v2", address, length, 0 if writable else _READ_ONLY)

    def unregister(self, address: int) -> None:
        """Undo ``register``."""
        _call("cuMemHostUnregister", address)

    def stream(self, *, urgent: bool) -> int:
        """Return a new stream that waits for no other; *urgent*: its kernels start before those of plain streams."""
        least, greatest = c_int(), c_int()
        _call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        return made("cuStreamCreateWithPriority", _NON_BLOCKING, greatest.value if urgent else least.value)

    def wait_stream(self, stream: int) -> None:
        """Block until everything in the stream is done."""
        _call("cuStreamSynchronize", stream)

    def drop_stream(self, stream: int) -> None:
        """Destroy a stream."""
        _call("cuStreamDestroy_v2", stream)

    def event(self) -> int:
        """Return a new event; a thread that waits for it spins, without the interpreter's lock.

        One that sleeps instead was seen to wake 0.1 ms late, a sixth of the time that a ring slot takes on the link.
        """
        return made("cuEventCreate", _UNTIMED)

    def drop_event(self, event: int) -> None:
        """Destroy an event."""
        _call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """Let the event happen when all that is in the stream now is done."""
        _call("cuEventRecord", event, stream)

    def wait_event(self, event: int) -> None:
        """Block until the event happened; at once if it was never recorded."""
        _call("cuEventSynchronize", event)

    def after_event(self, stream: int, event: int) -> None:
        """Let what is put into the stream from now on begin after an event of this process."""
        _call("cuStreamWaitEvent", stream, event, 0)

    def copy_in(self, device: int, host: int, length: int, stream: int) -> None:
        """Queue a copy from page-locked host memory to the device."""
        _call("cuMemcpyHtoDAsync_v2", device, host, length, stream)

    def copy_out(self, host: int, device: int, length: int, stream: int) -> None:
        """Queue a copy from the device to page-locked host memory."""
        _call("cuMemcpyDtoHAsync_v2", host, device, length, stream)


class Kernel:
    """A compiled kernel all of whose parameters are 64-bit numbers, launched by its driver handle. One thread.

    Measured on an H200: a launch this way takes 6.4 microseconds, through Triton's own launcher 41.
    """

    def __init__(self, function: int, threads: int, shared_bytes: int, parameters: int) -> None:
        """Prepare launches; a kernel may have a few more parameters than *parameters*: they are null."""
        self._values = (c_uint64 * (parameters + _SPARE_PARAMETERS))()
        start = ctypes.addressof(self._values)
        places = [start + _PARAMETER_BYTES * n for n in range(len(self._values))]
        self._places = (c_void_p * len(places))(*places)
        self._parameters = parameters
        # Converted once: each conversion at a launch costs the interpreter's lock a part of a microsecond.
        self._function = c_void_p(function)
        self._shape = (c_uint(1), c_uint(1), c_uint(threads), c_uint(1), c_uint(1), c_uint(shared_bytes))
        self._launch = _driver()["cuLaunchKernel"]

    def launch(self, programs: int, arguments: Sequence[int], stream: int) -> None:
        """Put a launch of *programs* blocks into a stream."""
        self._values[: self._parameters] = list(arguments)
        if code := self._launch(self._function, programs, *self._shape, stream, self._places, None):
            raise CudaError("cuLaunchKernel", code, _name(code))
