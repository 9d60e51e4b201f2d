# SPDX-License-Identifier: Apache-2.0
"""The descriptor socket: hands arena segments to clients of this node and tells when their processes die.

Messages are declared in ``kvpool.wire.descriptors``. All sockets and process handles lie in one epoll set, which the
loop polls as one descriptor; nothing here blocks. Thread: the loop's.
"""

import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import structlog

from kvpool.engine.outcomes import Access
from kvpool.model.errors import CacheError, InvalidRange, Malformed, NotRegistered, RoleForbidden
from kvpool.server.calls import Client
from kvpool.server.paths import SocketLock, claim, created_with
from kvpool.transfer.pipe import process_of
from kvpool.wire import codec
from kvpool.wire.descriptors import (
    AnyDescriptorReply,
    AnyDescriptorRequest,
    Attach,
    Granted,
    MapRegion,
    Region,
    pack,
    take_request,
)

__all__ = ["DescriptorServer", "Grants", "Segments"]

log = structlog.get_logger()

_READ_BYTES: Final = 8192
_BACKLOG: Final = 128
_ATTACH_S: Final = 5.0
_SPARE: Final = 32
"""Connections beyond one for each client."""


class Segments(Protocol):
    """The part of the arena that is needed here."""

    regions: int
    region_bytes: int

    def region_of(self, memory: int) -> int:
        """Return the region that a placement's memory is behind; -1 if none is (any more)."""

    def descriptor(self, region: int, *, writable: bool) -> int:
        """Return a fresh descriptor of one region; the caller closes it."""


@dataclass(frozen=True, slots=True)
class Grants:
    """What the descriptor socket asks of the rest of the server; all run on the loop."""

    client_of: Callable[[bytes], Client]
    """Ticket to client; raises UnknownLease."""

    access: Callable[[bytes, int], Access]
    """Which way a client may map a region."""

    died: Callable[[bytes], None]
    """The process of that client id is dead: nothing of it writes any more."""

    unwatched: Callable[[bytes], None]
    """No process handle tells about that client any more, although it may live."""


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    attach_by_s: float
    process: int
    """A pidfd; -1 if the kernel gives none."""

    client_id: bytes = b""
    buffer: bytearray = field(default_factory=bytearray)


class DescriptorServer:
    """Serves the descriptor socket.

    Args:
        segments: the arena.
        grants: who may have what.
        boot_id: of this server.
        most: clients at a time.
    """

    def __init__(self, segments: Segments, grants: Grants, boot_id: bytes, most: int) -> None:
        self._segments = segments
        self._grants = grants
        self._boot_id = boot_id
        self._most = most + _SPARE
        self._epoll = select.epoll()
        self._listener: socket.socket | None = None
        self._path = ""
        self._lock: SocketLock | None = None
        self._connections: dict[int, _Connection] = {}
        self._processes: dict[int, _Connection] = {}

    def fileno(self) -> int:
        """Readable whenever ``turn`` has something to do."""
        return self._epoll.fileno()

    def bind(self, path: str, mode: int) -> None:
        """Listen.

        Raises:
            ListenError: the path cannot be taken.
        """
        self._lock = claim(path, mode)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with created_with(mode):
            self._listener.bind(path)
        self._path = path
        self._listener.listen(_BACKLOG)
        self._epoll.register(self._listener, select.EPOLLIN)

    def turn(self, now_s: float) -> None:
        """Do all that is due: new connections, requests, ends of connections and of processes."""
        for fd, _ in self._epoll.poll(0):
            if self._listener is not None and fd == self._listener.fileno():
                self._accept(now_s)
            elif fd in self._processes:
                self._process_died(self._processes[fd])
            elif fd in self._connections:
                self._serve(self._connections[fd])

    def expire(self, now_s: float) -> None:
        """Close connections that did not say who they are."""
        for late in [c for c in self._connections.values() if not c.client_id and now_s >= c.attach_by_s]:
            self._close(late)

    def watches(self, client_id: bytes) -> bool:
        """True if a process handle tells whether this client lives and its connection is still there."""
        return any(c.client_id == client_id and c.process >= 0 for c in self._connections.values())

    def forget(self, client_id: bytes) -> None:
        """End what there is of a client that said goodbye."""
        for connection in [c for c in self._all() if c.client_id == client_id]:
            self._close(connection)
            self._forget_process(connection)

    def close(self) -> None:
        """Close everything and remove the socket. Idempotent."""
        for connection in self._all():
            self._close(connection)
            self._forget_process(connection)
        if self._listener is not None:
            Path(self._path).unlink(missing_ok=True)
            self._listener.close()
            self._listener = None
        if self._lock is not None:
            self._lock.close()
        self._epoll.close()

    def _all(self) -> set[_Connection]:
        return {*self._connections.values(), *self._processes.values()}

    def _accept(self, now_s: float) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as e:
            log.warning("descriptor.refused", error=e.strerror)
            return
        if max(len(self._connections), len(self._processes)) >= self._most:
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(sock, now_s + _ATTACH_S, process_of(sock))
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock, select.EPOLLIN)

    def _serve(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended(connection)
            return
        connection.buffer += data
        try:
            while (request := take_request(connection.buffer)) is not None:
                if not self._answer(connection, request):
                    self._ended(connection)
                    return
        except Malformed as e:
            self._reply(connection, codec.encode_failure(e), None)
            self._ended(connection)

    def _answer(self, connection: _Connection, request: AnyDescriptorRequest) -> bool:
        """Answer one request; False when the peer does not read."""
        fd = None
        try:
            match request:
                case Attach():
                    reply: AnyDescriptorReply = self._attach(connection, request)
                case MapRegion():
                    reply, fd = self._map(connection, request)
        except CacheError as e:
            reply = codec.encode_failure(e)
        try:
            return self._reply(connection, reply, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _attach(self, connection: _Connection, request: Attach) -> Granted:
        client = self._grants.client_of(request.ticket)
        for other in [c for c in self._all() if c.client_id == client.client_id and c is not connection]:
            # The same client connected again; its former connection tells nothing any more.
            self._close(other)
            self._forget_process(other)
        connection.client_id = client.client_id
        if connection.process >= 0 and connection.process not in self._processes:
            self._processes[connection.process] = connection
            self._epoll.register(connection.process, select.EPOLLIN)
        client.watched = connection.process >= 0
        return Granted(boot_id=self._boot_id, regions=self._segments.regions, region_bytes=self._segments.region_bytes)

    def _map(self, connection: _Connection, request: MapRegion) -> tuple[Region, int]:
        if not connection.client_id:
            raise NotRegistered("Attach comes first")
        region = self._segments.region_of(request.memory)
        if region < 0:
            raise InvalidRange(f"memory {request.memory} is behind no region (any more)")
        access = self._grants.access(connection.client_id, region)
        if access is Access.NONE or (request.writable and access is not Access.WRITE):
            raise RoleForbidden(f"region {region}: {access.value} access, which is not enough")
        fd = self._segments.descriptor(region, writable=request.writable)
        return Region(memory=request.memory, length=self._segments.region_bytes, writable=request.writable), fd

    def _reply(self, connection: _Connection, reply: AnyDescriptorReply, fd: int | None) -> bool:
        data = pack(reply)
        try:
            return socket.send_fds(connection.sock, [data], [] if fd is None else [fd]) == len(data)
        except OSError:
            return False

    def _ended(self, connection: _Connection) -> None:
        """The connection is over. Its process may live on; the handle keeps telling, but silence counts again."""
        self._close(connection)
        if connection.client_id:
            self._grants.unwatched(connection.client_id)

    def _process_died(self, connection: _Connection) -> None:
        self._close(connection)
        self._forget_process(connection)
        self._grants.died(connection.client_id)

    def _close(self, connection: _Connection) -> None:
        fd = connection.sock.fileno()
        if fd >= 0 and self._connections.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            connection.sock.close()
        if not connection.client_id:
            self._forget_process(connection)

    def _forget_process(self, connection: _Connection) -> None:
        if connection.process < 0:
            return
        if self._processes.pop(connection.process, None) is not None:
            self._epoll.unregister(connection.process)
        os.close(connection.process)
        connection.process = -1
