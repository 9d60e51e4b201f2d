# SPDX-License-Identifier: Apache-2.0
"""Tries out what movers need of one device: ``python -m kvpool.cli.doctor.probe try UUID FOLDER``.

The answer is one JSON object. What another process can do with this one's memory needs a second one:
``... probe open UUID HANDLE``, and ``... probe map UUID DESCRIPTOR:SALT``.
"""

import ctypes
import hashlib
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Final, Protocol

import msgspec

from kvpool.transfer.cuda import Context, CudaError

__all__ = ["Driver", "Probed", "last_words", "main", "map_in_child", "open_in_child", "probe"]

BYTES: Final = 256 << 20
TIMES: Final = 4
OPEN_S: Final = 30.0
PIECE_BYTES: Final = 4 << 20
"""Of virtual memory: a multiple of what any device can make."""

_SALT_BYTES: Final = 16


class Probed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of it; empty texts where all is well."""

    problem: str = ""
    """Why nothing could be tried."""

    handle: str = ""
    descriptors: str = ""
    pinning: str = ""
    store_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 0.0


class Driver(Protocol):
    """The part of ``kvpool.transfer.cuda.Context`` that is tried. All raise CudaError."""

    def use(self) -> None:
        """Prepare the calling thread."""

    def allocate(self, length: int) -> int:
        """Return the address of new device memory."""

    def free(self, address: int) -> None:
        """Free it."""

    def export(self, address: int) -> bytes:
        """Return a handle of an allocation for another process."""

    def create(self, length: int) -> int:
        """Return the address of new virtual memory that can be shared."""

    def export_descriptor(self, address: int) -> int:
        """Return a descriptor of it for another process."""

    def register(self, address: int, length: int) -> None:
        """Page-lock host memory."""

    def unregister(self, address: int) -> None:
        """Undo that."""

    def stream(self, *, urgent: bool) -> int:
        """Return a new stream."""

    def wait_stream(self, stream: int) -> None:
        """Block until all in it is done."""

    def copy_in(self, device: int, host: int, length: int, stream: int) -> None:
        """Queue a copy to the device."""

    def copy_out(self, host: int, device: int, length: int, stream: int) -> None:
        """Queue a copy from the device."""


def probe(
    driver: Callable[[], Driver],
    opens: Callable[[bytes], str],
    maps: Callable[[int, bytes], str],
    directory: str,
    clock: Callable[[], float] = perf_counter,
    length: int = BYTES,
) -> Probed:
    """Try handles, descriptors, pinning and copies of one device.

    Args:
        driver: opens it.
        opens: lets another process open a handle; returns why it could not.
        maps: lets another process map a descriptor, and compare what it finds with what is made of a salt; the same.
        directory: folder of the host memory.
        clock: seconds.
        length: bytes of device and of host memory to take for it.
    """
    try:
        device = driver()
        device.use()
        memory = device.allocate(length)
    except CudaError as e:
        return Probed(problem=str(e))
    try:
        found = _host(device, memory, directory, clock, length)
        handle, descriptors = _shared(device, memory, opens), _described(device, maps)
        return msgspec.structs.replace(found, handle=handle, descriptors=descriptors)
    except (CudaError, OSError) as e:
        return Probed(problem=str(e))
    finally:
        with suppress(CudaError):  # the device goes with the process
            device.free(memory)


def _shared(device: Driver, memory: int, opens: Callable[[bytes], str]) -> str:
    try:
        return opens(device.export(memory))
    except CudaError as e:
        return str(e)


def _described(device: Driver, maps: Callable[[int, bytes], str]) -> str:
    salt = os.urandom(_SALT_BYTES)
    content = _content(salt)
    try:
        memory, stream = device.create(PIECE_BYTES), device.stream(urgent=False)
        device.copy_in(memory, ctypes.addressof(content), PIECE_BYTES, stream)
        device.wait_stream(stream)
        descriptor = device.export_descriptor(memory)
    except CudaError as e:
        return str(e)
    try:
        return maps(descriptor, salt)
    finally:
        os.close(descriptor)


def _content(salt: bytes) -> "ctypes.Array[ctypes.c_char]":
    return ctypes.create_string_buffer(hashlib.shake_128(salt).digest(PIECE_BYTES), PIECE_BYTES)


def _host(device: Driver, memory: int, directory: str, clock: Callable[[], float], length: int) -> Probed:
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, length)
        mapping = mmap.mmap(file.fileno(), length)
        host = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        try:
            device.register(host, length)
        except CudaError as e:
            return Probed(pinning=str(e))
        try:
            stream = device.stream(urgent=False)
            store = _speed(lambda: device.copy_out(host, memory, length, stream), device, stream, clock)
            load = _speed(lambda: device.copy_in(memory, host, length, stream), device, stream, clock)
        finally:
            with suppress(CudaError):
                device.unregister(host)
        return Probed(store_bytes_per_s=length / store, load_bytes_per_s=length / load)


def _speed(copy: Callable[[], None], device: Driver, stream: int, clock: Callable[[], float]) -> float:
    """Return the seconds of the quickest copy, after one that is not counted."""
    taken = []
    for _ in range(1 + TIMES):
        begun_s = clock()
        copy()
        device.wait_stream(stream)
        taken.append(clock() - begun_s)
    return min(taken[1:])


def open_in_child(uuid: str, handle: bytes) -> str:
    """Let another process open a handle; returns why it could not."""
    return _in_child("open", uuid, handle.hex())


def map_in_child(uuid: str, descriptor: int, salt: bytes) -> str:
    """Let another process map a descriptor and compare; returns why it could not, or that it found other bytes."""
    return _in_child("map", uuid, f"{descriptor}:{salt.hex()}", descriptor)


def _in_child(what: str, uuid: str, argument: str, *descriptors: int) -> str:
    command = [sys.executable, "-m", "kvpool.cli.doctor.probe", what, uuid, argument]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, capture_output=True, timeout=OPEN_S, check=False, pass_fds=descriptors
        )
    except subprocess.TimeoutExpired:
        return f"its process did not answer within {OPEN_S:.0f} s"
    if not done.returncode:
        return ""
    return last_words(done) or f"its process ended with {done.returncode}"


def last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the last line that a process wrote to its standard error."""
    return (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]


def _device(uuid: str) -> Context:
    return Context.of_uuid(bytes.fromhex(uuid.removeprefix("GPU-").replace("-", "")))


def _differs(device: Driver, address: int, salt: bytes) -> bool:
    found, stream = ctypes.create_string_buffer(PIECE_BYTES), device.stream(urgent=False)
    device.copy_out(ctypes.addressof(found), address, PIECE_BYTES, stream)
    device.wait_stream(stream)
    return found.raw != _content(salt).raw


def main(what: str, uuid: str, argument: str) -> int:
    """Try, or be the other process of a trial."""
    if what == "try":
        found = probe(lambda: _device(uuid), partial(open_in_child, uuid), partial(map_in_child, uuid), argument)
        print(msgspec.json.encode(found).decode())
        return 0
    try:
        device = _device(uuid)
        device.use()
        if what == "open":
            device.open(bytes.fromhex(argument))
            return 0
        descriptor, _, salt = argument.partition(":")
        if _differs(device, device.map([(int(descriptor), PIECE_BYTES)]), bytes.fromhex(salt)):
            print("other bytes were found there", file=sys.stderr)
            return 1
    except CudaError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
