# SPDX-License-Identifier: Apache-2.0
"""The client's end of the descriptor socket."""

import os
import socket
import threading

from kvpool.model.errors import CacheError, Malformed, ServerUnavailable, StaleBoot
from kvpool.wire.codec import error_of
from kvpool.wire.descriptors import (
    AnyDescriptorReply,
    AnyDescriptorRequest,
    Attach,
    Granted,
    MapRegion,
    Region,
    pack,
    take_reply,
)
from kvpool.wire.messages import Failed

__all__ = ["Descriptors"]

_RECEIVE_BYTES = 4096


class Descriptors:
    """One connection to the descriptor socket, for the life of a session. Any thread; one request at a time."""

    def __init__(self, path: str, ticket: bytes, boot_id: bytes, timeout_s: float) -> None:
        """Connect and attach; blocks up to *timeout_s* for each step.

        Raises:
            CacheError: nobody listens, or the server refuses the ticket.
        """
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(path)
            granted, _ = self._ask(Attach(ticket=ticket))
        except OSError as e:
            self._socket.close()
            raise ServerUnavailable(f"descriptor socket {path}: {e}") from e
        except CacheError:
            self._socket.close()
            raise
        if not isinstance(granted, Granted) or granted.boot_id != boot_id:
            self._socket.close()
            raise StaleBoot("the descriptor socket belongs to another run of the server")

    def fetch(self, memory: int, *, writable: bool) -> tuple[int, int]:
        """Return a descriptor of *memory*, which the caller closes, and the region's length.

        Raises:
            CacheError: the server refuses, or is gone.
        """
        with self._lock:
            try:
                reply, descriptors = self._ask(MapRegion(memory=memory, writable=writable))
            except OSError as e:
                raise ServerUnavailable(f"descriptor socket: {e}") from e
        if isinstance(reply, Region) and reply.memory == memory and len(descriptors) == 1:
            return descriptors[0], reply.length
        _close_all(descriptors)
        raise Malformed(f"descriptor socket: memory {memory} came with {len(descriptors)} descriptors")

    def close(self) -> None:
        """End the connection; the server learns from it that this session is over. Idempotent, does not wait."""
        self._socket.close()

    def _ask(self, request: AnyDescriptorRequest) -> tuple[AnyDescriptorReply, list[int]]:
        self._socket.sendall(pack(request))
        descriptors: list[int] = []
        try:
            while (reply := take_reply(self._buffer)) is None:
                data, got, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
                descriptors += got
                if not data:
                    raise ServerUnavailable("descriptor socket: the server closed it")
                self._buffer += data
            if isinstance(reply, Failed):
                raise error_of(reply)
        except (CacheError, OSError):
            _close_all(descriptors)
            raise
        return reply, descriptors


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
