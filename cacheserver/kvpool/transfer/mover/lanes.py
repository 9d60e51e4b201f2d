# SPDX-License-Identifier: Apache-2.0
"""One direction of a mover: a thread that queues copies as moves come, another that reports them as they end."""

import queue
import threading
from collections.abc import Callable
from time import monotonic

from kvpool.transfer.mover.checks import Checks
from kvpool.transfer.mover.grants import Copies, Grants, NotGrantedError
from kvpool.transfer.mover.memory import Memory, UnknownMemoryError
from kvpool.transfer.mover.messages import Direction, FromClient, Move, Moved, Revoked, Ring
from kvpool.transfer.mover.pace import Pace
from kvpool.transfer.mover.ports import DeviceFailedError, MoverDevice
from kvpool.transfer.pipe import Pipe, PipeClosedError

__all__ = ["Landing", "MoverLane", "Rig"]


class Rig:
    """What the lanes of a mover share.

    Args:
        ring: the client's.
        device: where it is.
        memory: the arena.
        grants: what may be moved.
        revoked: called with the end of a grant whose last move ended after it was revoked.
        broken: called with a text when the device failed; does not return.
    """

    def __init__(
        self,
        ring: Ring,
        device: MoverDevice,
        memory: Memory,
        grants: Grants,
        revoked: Callable[[Revoked], None],
        broken: Callable[[str], None],
    ) -> None:
        self.ring, self.device, self.memory, self.grants = ring, device, memory, grants
        self.revoked, self.broken = revoked, broken
        self.checks = Checks(grants, memory, revoked)


class Landing:
    """Waits for the copies of one lane, one after the other, and notes what they brought. One thread."""

    def __init__(self, rig: Rig, direction: Direction) -> None:
        self._rig, self._direction = rig, direction
        self._pace, self._pause = Pace(), threading.Event()

    def end(self, move: Move, queued_s: float) -> tuple[float, Revoked | None]:
        """Wait for a move's copies; returns when they had ended, and the end of the grant if nothing is left of it.

        Raises:
            DeviceFailedError: the device does not say.
        """
        length = move.length * len(move.chunks)
        if sleep_s := self._pace.sleep_s(length, queued_s, monotonic()):
            self._pause.wait(sleep_s)
        self._rig.device.wait(self._direction, move.slot)
        now_s = monotonic()
        self._pace.ended(length, queued_s, now_s)
        if self._direction is Direction.STORE:
            self._rig.checks.arrived(move)
        else:
            self._rig.grants.came(move)
        return now_s, self._rig.grants.end(move.grant, length)


class MoverLane:
    """Serves one connection of the client until it hangs up."""

    def __init__(self, rig: Rig, pipe: Pipe[FromClient], direction: Direction) -> None:
        self._rig, self._pipe, self._direction = rig, pipe, direction
        self._queued: queue.SimpleQueue[tuple[Move, float] | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Take moves; returns when the connection has ended and nothing runs any more. The lane's thread."""
        waiter = threading.Thread(target=self._report, name=f"{self._direction}-done", daemon=True)
        waiter.start()
        self._rig.device.use()
        try:
            while isinstance(move := self._pipe.receive(), Move):
                self._take(move)
        except PipeClosedError:
            pass  # the client ended or left; the server learns that by itself
        finally:
            self._queued.put(None)
            waiter.join()
            self._pipe.close()

    def _take(self, move: Move) -> None:
        rig = self._rig
        if move.slot >= rig.ring.slots:
            self._answer(Moved(turn=move.turn, error="no such slot"))
            return
        try:
            copies = rig.grants.begin(move, self._direction, rig.ring.slot_bytes)
        except NotGrantedError as e:
            self._answer(Moved(turn=move.turn, error=str(e)))
            return
        queued_s = monotonic()
        try:
            if self._direction is Direction.LOAD and (wrong := rig.checks.wrong(move)):
                self._refuse(move, wrong)
                return
            self._queue(copies, move.slot)
            rig.device.mark(self._direction, move.slot)
        except (DeviceFailedError, UnknownMemoryError) as e:
            rig.broken(str(e))
            raise
        self._queued.put((move, queued_s))

    def _refuse(self, move: Move, wrong: tuple[int, ...]) -> None:
        """End a load's move without a copy."""
        ended = self._rig.grants.end(move.grant)
        self._answer(Moved(turn=move.turn, error="a chunk is not what was stored", wrong=wrong))
        if ended is not None:
            self._rig.revoked(ended)

    def _queue(self, copies: Copies, slot: int) -> None:
        start = self._rig.ring.offset(self._direction, slot)
        for memory, offset, within, length in copies:
            address = self._rig.memory.address(memory, offset, length)
            self._rig.device.copy(self._direction, start + within, address, length)

    def _report(self) -> None:
        self._rig.device.use()
        landing = Landing(self._rig, self._direction)
        while (item := self._queued.get()) is not None:
            move, queued_s = item
            try:
                now_s, ended = landing.end(move, queued_s)
            except DeviceFailedError as e:
                self._rig.broken(str(e))
                raise
            if ended is not None:
                # First: the answer to a commit waits for it, and goes the longer way.
                self._rig.revoked(ended)
            self._answer(Moved(turn=move.turn, copy_s=now_s - queued_s))

    def _answer(self, moved: Moved) -> None:
        try:
            self._pipe.send(moved)
        except PipeClosedError:
            return  # nobody is left to be told; the copies were made all the same
