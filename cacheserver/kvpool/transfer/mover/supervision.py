# SPDX-License-Identifier: Apache-2.0
"""The server's side of a mover: it starts, feeds, watches, kills and reaps one, and never waits for it.

Only a reaped process writes no more. Until then whatever was granted to it stays held.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.mover.messages import (
    Broken,
    Direction,
    Forget,
    FromMover,
    Grant,
    Ready,
    Revoke,
    Revoked,
    Segment,
    Start,
)
from kvpool.transfer.pipe import Frames, PipeClosedError, frame

__all__ = ["MOVER_COMMAND", "Mover", "MoverLimits", "MoverState"]

MOVER_COMMAND: Final = (sys.executable, "-m", "kvpool.transfer.mover")

_ROOM: Final = 1 << 16


class MoverState(StrEnum):
    """Where a mover is in its life."""

    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"
    """It was killed, or said that it is broken, and still exists."""

    REAPED = "reaped"


class MoverLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a mover may take."""

    start_s: float = 20.0
    """From its start to Ready: an interpreter, a CUDA context, a ring."""

    revoke_s: float = 5.0
    """From Revoke to Revoked: the copies that run."""


class Mover:
    """One mover process.

    Thread: one thread starts it and calls everything; it must outlive the mover, which is killed with it. That thread
    watches ``fileno`` (for writing, too, while ``wants_write``) and calls ``turn`` when it is ready and now and then.
    """

    def __init__(
        self, command: Sequence[str], start: Start, client_pid: int, now_s: float, limits: MoverLimits | None = None
    ) -> None:
        """Start a mover.

        Args:
            command: the mover's program; it gets the control socket's descriptor and this process's id.
            start: what it is told first.
            client_pid: the client's process id in its own namespace; the mover gets another one, because the driver
                refuses handles between processes of the same number.
            now_s: monotonic.
            limits: after these it is killed.

        Raises:
            OSError: no process or socket can be had.
        """
        self._limits = limits or MoverLimits()
        self._process, self._socket = _spawn(command, client_pid)
        self._socket.setblocking(False)
        self._frames: Frames[FromMover] = Frames(FromMover)
        self._outgoing: deque[tuple[bytes, int]] = deque()
        self._deadlines: dict[bytes, float] = {b"": now_s + self._limits.start_s}
        self._killed = False
        self.state = MoverState.STARTING
        self.address = ""
        """Where the client joins it; empty until READY."""
        self.reason = ""
        """Why it ends or ended."""
        self._put(start)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def wants_write(self) -> bool:
        """True while something could not be sent yet."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """Return the control socket's descriptor."""
        return self._socket.fileno()

    def give_segment(self, memory: int, descriptor: int, length: int) -> None:
        """Hand out memory of the arena by its number; the descriptor becomes the mover's."""
        self._put(Segment(memory=memory, length=length), descriptor)

    def take_segment(self, memory: int) -> None:
        """Take memory of the arena back, after every grant with chunks in it has ended."""
        self._put(Forget(memory=memory))

    def grant(self, grant: bytes, direction: Direction, rows: NDArray[np.void], checks: bytes = b"") -> None:
        """Let the client move these chunks; rows with disposition 0 are left out. *checks*: see ``Grant``."""
        self._put(Grant(grant=grant, direction=direction, rows=rows.tobytes(), checks=checks))

    def revoke(self, grant: bytes, now_s: float) -> None:
        """End a grant. ``turn`` returns its Revoked; if that does not come in time, the mover is killed."""
        self._deadlines[grant] = now_s + self._limits.revoke_s
        self._put(Revoke(grant=grant))

    def turn(self, now_s: float) -> list[Revoked]:
        """Send and receive what can be, look at deadlines, reap; returns the grants that ended. Never waits."""
        ended: list[Revoked] = []
        if self.state in (MoverState.STARTING, MoverState.READY):
            try:
                self._flush()
                self._receive(ended)
            except (PipeClosedError, OSError) as e:
                self.kill(str(e))
            if any(ends_s <= now_s for ends_s in self._deadlines.values()):
                self.kill("it did not answer in time")
        if self.state is MoverState.ENDING and self._process.poll() is not None:
            self.state = MoverState.REAPED
            self._socket.close()
        return ended

    def next_deadline_s(self) -> float | None:
        """Return when ``turn`` has to look at a deadline."""
        return min(self._deadlines.values(), default=None)

    def kill(self, reason: str) -> None:
        """End it. It is gone when ``turn`` has made it REAPED. Idempotent."""
        if self.state is MoverState.REAPED:
            return
        self.state = MoverState.ENDING
        self.reason = self.reason or reason
        self._deadlines.clear()
        self._drop_outgoing()
        self._process.kill()

    def _put(self, message: msgspec.Struct, descriptor: int = -1) -> None:
        if self.state in (MoverState.ENDING, MoverState.REAPED):
            _close(descriptor)
            return
        self._outgoing.append((frame(message), descriptor))

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                data, descriptor = self._outgoing[0]
                sent = socket.send_fds(self._socket, [data], [descriptor] if descriptor >= 0 else [])
                _close(descriptor)
                if sent == len(data):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = data[sent:], -1

    def _receive(self, ended: list[Revoked]) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := self._socket.recv(_ROOM):
                self._frames.feed(data)
                while (message := self._frames.next()) is not None:
                    self._hear(message, ended)
            raise PipeClosedError("it ended")

    def _hear(self, message: FromMover, ended: list[Revoked]) -> None:
        match message:
            case Ready(address=address):
                self.address, self.state = address, MoverState.READY
                self._deadlines.pop(b"", None)
            case Revoked(grant=grant):
                self._deadlines.pop(grant, None)
                ended.append(message)
            case Broken(detail=detail):
                self.kill(detail)

    def _drop_outgoing(self) -> None:
        while self._outgoing:
            _close(self._outgoing.popleft()[1])


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _spawn(command: Sequence[str], client_pid: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the program; one that got the client's number is started again while the first still has it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        process = _start(command, theirs)
        if process.pid == client_pid:
            spare, process = process, _start(command, theirs)
            spare.kill()
            spare.wait()
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def _start(command: Sequence[str], theirs: socket.socket) -> subprocess.Popen[bytes]:
    arguments = [*command, str(theirs.fileno()), str(os.getpid())]
    return subprocess.Popen(  # noqa: S603 - our own program
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
    )
