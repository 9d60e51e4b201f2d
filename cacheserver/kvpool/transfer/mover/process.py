# SPDX-License-Identifier: Apache-2.0
"""The mover's process: from the socket it was born with to its exit.

It ends, at once and without tidying up, when the server hangs up, says so, or dies; the kernel and the driver take back
whatever it had. Nothing in it may outlive the server: a copy that nobody supervises could write into a slot that the
next server has given to somebody else.
"""

import ctypes
import hmac
import os
import signal
import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, NoReturn, TypeGuard

from kvpool.transfer.mover.grants import Grants
from kvpool.transfer.mover.lanes import MoverLane, Rig
from kvpool.transfer.mover.mapped_cache import MappedCache
from kvpool.transfer.mover.mapped_lane import MappedLane
from kvpool.transfer.mover.memory import Memory, UnknownMemoryError
from kvpool.transfer.mover.messages import (
    Broken,
    Forget,
    FromClient,
    FromServer,
    Grant,
    Join,
    Joined,
    Ready,
    Revoke,
    Ring,
    Segment,
    Start,
)
from kvpool.transfer.mover.ports import DeviceFailedError, MoverDevice
from kvpool.transfer.pipe import Pipe, PipeClosedError

__all__ = ["MoverProcess", "die_with_parent"]

_PR_SET_PDEATHSIG: Final = 1
_START_S: Final = 10.0
_JOIN_S: Final = 5.0
_BACKLOG: Final = 4
_SOCKET_MODE: Final = 0o666
"""The client may be another user; the secret decides."""

_EXIT: Final = 3


def die_with_parent(parent: int) -> None:
    """Be killed when the thread that started this process ends; end at once if *parent* is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_EXIT)


class MoverProcess:
    """One mover. ``run`` is the process's main thread and never returns."""

    def __init__(self, control: socket.socket, open_device: Callable[[Ring], MoverDevice]) -> None:
        self._pipe: Pipe[FromServer] = Pipe(control, FromServer, descriptors=True)
        self._open_device = open_device
        self._grants = Grants()
        self._cache: MappedCache | None = None
        self._wanted = threading.Semaphore(0)

    def run(self) -> NoReturn:
        """Serve until the server hangs up."""
        try:
            start = self._pipe.receive(monotonic() + _START_S)
            if not isinstance(start, Start):
                raise PipeClosedError("the first message is no Start")
            self._serve(start)
        except (DeviceFailedError, OSError) as e:  # also a socket that ended, a message too late or wrong
            self._break(str(e))

    def _serve(self, start: Start) -> NoReturn:
        device = self._open_device(start.ring)
        memory = Memory(device)
        rig = Rig(start.ring, device, memory, self._grants, self._pipe.send, self._break)
        if not start.ring.handle:
            self._cache = MappedCache(device, start.ring)
        listener, address = _listen(start.listen)
        self._thread(self._register, device, memory)
        self._thread(rig.checks.run)
        self._thread(self._accept, listener, start, rig)
        self._pipe.send(Ready(address=address))
        while True:
            self._obey(self._pipe.receive(), memory)

    def _obey(self, message: FromServer, memory: Memory) -> None:
        match message:
            case Segment():
                memory.add(message.memory, self._pipe.take_descriptor(), message.length)
                self._wanted.release()
            case Forget():
                memory.forget(message.memory)
            case Grant():
                self._grants.add(message)
            case Revoke():
                ended = self._grants.revoke(message.grant)
                if ended is not None:
                    self._pipe.send(ended)
            case Start():
                raise PipeClosedError("a second Start")

    def _register(self, device: MoverDevice, memory: Memory) -> None:
        device.use()
        while True:
            self._wanted.acquire()
            memory.register_next()

    def _accept(self, listener: socket.socket, start: Start, rig: Rig) -> None:
        while True:
            connection, _ = listener.accept()
            self._thread(self._admit, connection, start, rig)

    def _admit(self, connection: socket.socket, start: Start, rig: Rig) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe: Pipe[FromClient] = Pipe(connection, FromClient)
        try:
            join = pipe.receive(monotonic() + _JOIN_S)
            if not _is_admitted(join, start):
                pipe.close()
                return
            pipe.send(Joined())
        except (PipeClosedError, TimeoutError):
            pipe.close()
            return
        if self._cache is None:
            MoverLane(rig, pipe, join.direction).run()
        else:
            # Descriptors are taken from whoever was admitted, and from nobody before.
            exporting: Pipe[FromClient] = Pipe(connection, FromClient, descriptors=True)
            MappedLane(rig, self._cache, exporting, join.direction).run()

    def _thread(self, target: Callable[..., None], *arguments: Any) -> None:
        def guarded() -> None:
            try:
                target(*arguments)
            except (DeviceFailedError, UnknownMemoryError, OSError) as e:
                self._break(str(e))

        threading.Thread(target=guarded, daemon=True).start()

    def _break(self, detail: str) -> NoReturn:
        """Say why and end: after a failed call nothing about this device can be trusted."""
        try:
            self._pipe.send(Broken(detail=detail))
        finally:
            os._exit(_EXIT)


def _is_admitted(join: FromClient, start: Start) -> TypeGuard[Join]:
    """Tell this ring's client from anybody else, and from its own former self."""
    return (
        isinstance(join, Join)
        and hmac.compare_digest(join.secret, start.secret)
        and join.generation == start.ring.generation
    )


def _listen(where: str) -> tuple[socket.socket, str]:
    kind, _, rest = where.partition(":")
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(rest)
        os.chmod(rest, _SOCKET_MODE)  # noqa: PTH101 - a socket's path
        address = where
    else:
        host, _, port = rest.rpartition(":")
        six = ":" in host
        family = socket.AF_INET6 if six else socket.AF_INET
        listener = socket.create_server((host, int(port)), family=family, backlog=_BACKLOG, dualstack_ipv6=six)
        address = f"tcp:{host}:{listener.getsockname()[1]}"
    listener.listen(_BACKLOG)
    return listener, address
