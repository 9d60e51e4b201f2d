# SPDX-License-Identifier: Apache-2.0
"""One direction of a mover in mode mapped: a job is cut into turns, which are queued ahead as far as slots are free.

The lane's one thread queues, waits and listens: between two turns it sees whether the job was cancelled or its client
is gone, and then begins no more of them. It answers when nothing of the job runs. Jobs that come meanwhile wait.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from kvpool.transfer.mover.grants import Copies, NotGrantedError
from kvpool.transfer.mover.lanes import Landing, Rig
from kvpool.transfer.mover.mapped_cache import MappedCache
from kvpool.transfer.mover.memory import UnknownMemoryError
from kvpool.transfer.mover.messages import (
    Cancel,
    Direction,
    Done,
    Export,
    Exported,
    FromClient,
    Job,
    Move,
    Piece,
    Revoked,
)
from kvpool.transfer.mover.ports import DeviceFailedError
from kvpool.transfer.pipe import Pipe, PipeClosedError
from kvpool.transfer.plan import Turn
from kvpool.transfer.planes import LayoutError

__all__ = ["MappedLane"]


class MappedLane:
    """Serves one connection of the client until it hangs up."""

    def __init__(self, rig: Rig, cache: MappedCache, pipe: Pipe[FromClient], direction: Direction) -> None:
        self._rig, self._cache, self._pipe, self._direction = rig, cache, pipe, direction
        self._free: deque[int] = deque(range(rig.ring.slots))
        self._under_way: deque[tuple[Move, float]] = deque()
        self._waiting: deque[FromClient] = deque()
        self._cancelled: set[int] = set()
        self._landing = Landing(rig, direction)

    def run(self) -> None:
        """Take jobs; returns when the connection has ended and nothing runs any more. The lane's thread."""
        self._rig.device.use()
        try:
            while True:
                self._hear(self._waiting.popleft() if self._waiting else self._pipe.receive())
        except PipeClosedError:
            pass  # the client ended or left; the server learns that by itself
        except (DeviceFailedError, UnknownMemoryError) as e:
            self._rig.broken(str(e))
            raise
        finally:
            self._pipe.close()

    def _hear(self, message: FromClient) -> None:
        match message:
            case Job():
                self._pipe.send(self._done(message))
                self._cancelled = {number for number in self._cancelled if number > message.job}
            case Cancel():
                self._cancelled.add(message.job)
            case Piece() if self._direction is Direction.STORE:
                self._cache.add(message, -1 if message.handle is not None else self._pipe.take_descriptor())
            case Export() if self._direction is Direction.STORE:
                self._pipe.send(Exported(error=self._open(message)))
            case _:
                raise PipeClosedError("not a message of this lane")

    def _open(self, export: Export) -> str:
        """Return why the cache cannot be mapped; empty if it is."""
        try:
            self._cache.open(export)
        except (LayoutError, DeviceFailedError) as e:
            return str(e)
        return ""

    def _done(self, job: Job) -> Done:
        try:
            ids = self._cache.ids(job)
        except (IndexError, ValueError) as e:
            return Done(job=job.job, error=str(e), failed=job.chunks)
        run = _Run(job, ids, deque(self._cache.turns(job)))
        try:
            while run.turns:
                self._next(run)
        finally:
            while self._under_way:
                self._end_oldest()
        return Done(job=job.job, error=run.error, failed=tuple(run.failed), wrong=tuple(run.wrong))

    def _next(self, run: "_Run") -> None:
        """Begin a job's next turn, or give up all that are left."""
        if not self._free:
            self._end_oldest()
        self._listen()
        if run.job.job in self._cancelled:
            run.give_up("cancelled")
            return
        turn = run.turns.popleft()
        part = turn.part
        # The grant knows nothing of jobs: to it this is what a client with a ring would ask for.
        move = Move(
            turn=0, slot=self._free[0], grant=run.job.grant, offset=part.offset, length=part.length, chunks=turn.chunks
        )
        try:
            copies = self._rig.grants.begin(move, self._direction, self._rig.ring.slot_bytes)
        except NotGrantedError as e:
            run.turns.appendleft(turn)
            run.give_up(str(e))
            return
        if self._direction is Direction.LOAD and (wrong := self._rig.checks.wrong(move)):
            self._tell(self._rig.grants.end(move.grant))
            run.refuse(turn, wrong)
            return
        queued_s = monotonic()
        self._cache.queue(self._direction, move.slot, run.job, turn, run.ids_of(turn), self._places(copies))
        self._under_way.append((move, queued_s))
        self._free.popleft()

    def _places(self, copies: Copies) -> list[tuple[int, int, int]]:
        address = self._rig.memory.address
        return [(within, address(memory, offset, length), length) for memory, offset, within, length in copies]

    def _end_oldest(self) -> None:
        move, queued_s = self._under_way.popleft()
        _, ended = self._landing.end(move, queued_s)
        self._free.append(move.slot)
        self._tell(ended)

    def _tell(self, ended: Revoked | None) -> None:
        """Let the server know of a grant of which nothing is left."""
        if ended is not None:
            self._rig.revoked(ended)

    def _listen(self) -> None:
        """Take what the client has said in the middle of a job.

        Raises:
            PipeClosedError: it is gone.
        """
        with suppress(TimeoutError):
            while True:
                message = self._pipe.receive(0.0)
                if isinstance(message, Cancel):
                    self._cancelled.add(message.job)
                else:
                    self._waiting.append(message)


class _Run:
    """A job under way."""

    def __init__(self, job: Job, ids: NDArray[np.int64], turns: deque[Turn]) -> None:
        self.job, self.turns = job, turns
        self._ids = ids
        self.error = ""
        self.failed: set[int] = set()
        self.wrong: set[int] = set()

    def ids_of(self, turn: Turn) -> NDArray[np.int64]:
        return self._ids[turn.first : turn.first + len(turn.chunks)]

    def give_up(self, error: str) -> None:
        """Fail all chunks of which not every turn was begun."""
        self.error = error
        self.failed.update(chunk for turn in self.turns for chunk in turn.chunks)
        self.turns.clear()

    def refuse(self, turn: Turn, wrong: Sequence[int]) -> None:
        """Leave out chunks of a turn that are not what was stored."""
        self.error = "a chunk is not what was stored"
        self.wrong.update(wrong)
        self.failed.update(wrong)
        self.turns.extendleft(reversed(turn.without(wrong)))
