# SPDX-License-Identifier: Apache-2.0
"""Typed messages over a stream socket: four bytes of length, then msgpack. One thread receives, any thread sends."""

import contextlib
import os
import select
import socket
import struct
import threading
from time import monotonic
from typing import Any, Final, Generic, TypeVar

import msgspec

__all__ = ["FRAME_BYTES", "Frames", "Pipe", "PipeClosedError", "frame", "process_of"]

FRAME_BYTES: Final = 16 << 20
"""Largest message."""

_LENGTH: Final = struct.Struct("<I")
_ENCODER: Final = msgspec.msgpack.Encoder()
_ROOM: Final = 1 << 16
_DESCRIPTORS: Final = 8
_SO_PEERPIDFD: Final = 77
"""A handle of the peer's process, race-free and across process namespaces; not in Python's socket module yet."""

_CREDENTIALS: Final = struct.Struct("iii")

M = TypeVar("M")


class PipeClosedError(ConnectionError):
    """The other side is gone, does not read, or sent what is no message."""


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as it travels."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


def process_of(end: socket.socket) -> int:
    """Return a handle of the process that made the other end of a Unix socket, or -1; readable once it is gone."""
    with contextlib.suppress(OSError):
        return end.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    # A kernel without it. The number could have been reused since, but only by a process that lives: that is
    # noticed later, never wrongly early.
    with contextlib.suppress(OSError):
        pid = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
        return os.pidfd_open(pid) if pid > 0 else -1
    return -1


class Frames(Generic[M]):
    """Bytes in, messages out."""

    def __init__(self, incoming: Any) -> None:
        """Expect the types in *incoming*, a union of tagged structs."""
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what the socket gave."""
        self._bytes += data

    def next(self) -> M | None:
        """Return the next message, or None while it is not whole.

        Raises:
            PipeClosedError: it is too long, or no message of ours.
        """
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > FRAME_BYTES:
            raise PipeClosedError(f"a message of {length} bytes; {FRAME_BYTES} are allowed")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        try:
            message: M = self._decode(body)
        except msgspec.MsgspecError as e:
            raise PipeClosedError(f"no message: {e}") from e
        return message


class Pipe(Generic[M]):
    """One end of a connection. Owns its socket."""

    def __init__(self, end: socket.socket, incoming: Any, *, descriptors: bool = False, send_s: float = 5.0) -> None:
        """Receive messages of the types in *incoming*, over a Unix socket with *descriptors* if told so.

        A send that takes longer than *send_s* means that the other side does not read any more.
        """
        end.settimeout(send_s)
        self._socket = end
        self._frames: Frames[M] = Frames(incoming)
        self._expects = descriptors
        self._descriptors: list[int] = []
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, message: msgspec.Struct, descriptor: int = -1) -> None:
        """Send a message, over a Unix socket with a descriptor, which stays the caller's. Any thread.

        Raises:
            PipeClosedError: the other side is gone or does not read.
        """
        data = frame(message)
        try:
            with self._sending:
                sent = socket.send_fds(self._socket, [data], [descriptor]) if descriptor >= 0 else 0
                self._socket.sendall(data[sent:])
        except OSError as e:
            raise PipeClosedError(f"cannot send: {e}") from e

    def receive(self, ends_s: float | None = None) -> M:
        """Return the next message.

        Raises:
            PipeClosedError: there will be none.
            TimeoutError: none came until *ends_s* (monotonic).
        """
        while (message := self._frames.next()) is None:
            left_ms = None if ends_s is None else max(0.0, ends_s - monotonic()) * 1000
            if not self._poll.poll(left_ms):
                raise TimeoutError("no message came in time")
            self._read()
        return message

    def take_descriptor(self) -> int:
        """Return the oldest descriptor that came; the caller closes it.

        Raises:
            PipeClosedError: none came.
        """
        if not self._descriptors:
            raise PipeClosedError("a message came without its descriptor")
        return self._descriptors.pop(0)

    def peer(self) -> int:
        """Return a handle of the process at the other end (see ``process_of``); the caller closes it."""
        return process_of(self._socket)

    def close(self) -> None:
        """Hang up: both sides see an end. Any thread; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _read(self) -> None:
        try:
            if self._expects:
                data, descriptors, _, _ = socket.recv_fds(self._socket, _ROOM, _DESCRIPTORS)
                self._descriptors += descriptors
            else:
                data = self._socket.recv(_ROOM)
        except OSError as e:
            raise PipeClosedError(f"cannot receive: {e}") from e
        if not data:
            raise PipeClosedError("the other side hung up")
        self._frames.feed(data)
