# SPDX-License-Identifier: Apache-2.0
"""The two lanes of a ring, each with its slots, its stream, its connection to the mover and a thread that waits.

A lane's job is run by its caller's thread: it launches kernels as far ahead as slots are free and takes the mover's
answers. The lane's own thread waits for the kernels' events in their order and tells the mover. No stream of the engine
ever waits for the mover: what does not come costs a deadline.
"""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

from kvpool.transfer.cuda import CudaError
from kvpool.transfer.mover.messages import Direction, Move, Moved, ToClient
from kvpool.transfer.pipe import Pipe, PipeClosedError
from kvpool.transfer.plan import Turn
from kvpool.transfer.ring_ports import EngineDevice, RingJob

__all__ = ["LoadLane", "RingRetiredError", "StoreLane"]

_TROUBLE: Final = (CudaError, PipeClosedError, TimeoutError)


class RingRetiredError(Exception):
    """The ring is not used any more; the text says why. Nothing of the job that it ended may be counted as moved."""


class _Lane:
    """What both directions have in common: numbered moves under way, and the thread that waits for kernels."""

    def __init__(
        self, direction: Direction, device: EngineDevice, pipe: Pipe[ToClient], retire: Callable[[str], None]
    ) -> None:
        self.direction, self.device, self.pipe, self.retire = direction, device, pipe, retire
        self.free: deque[int] = deque(range(device.ring.slots))
        self.under_way: dict[int, tuple[int, Turn]] = {}
        self._numbers = itertools.count()
        self._launched: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name=f"kvpool-ring-{direction}", daemon=True)
        self._thread.start()

    def launch(self, slot: int, job: RingJob, turn: Turn, then: Callable[[], object]) -> None:
        """Launch a kernel and let the lane's thread call *then* once it is done."""
        self.device.launch(self.direction, slot, job, turn)

        def done() -> None:
            self.device.wait(self.direction, slot)
            job.end()
            then()

        self._launched.put(done)

    def then(self, call: Callable[[], None]) -> None:
        """Let the lane's thread make a call once all kernels that were launched are done."""
        self._launched.put(call)

    def number(self, slot: int, turn: Turn) -> int:
        """Note a move before the mover can answer it."""
        number = next(self._numbers)
        self.under_way[number] = (slot, turn)
        return number

    def ask(self, number: int, slot: int, job: RingJob, turn: Turn) -> None:
        """Tell the mover."""
        part = turn.part
        move = Move(turn=number, slot=slot, grant=job.grant, offset=part.offset, length=part.length, chunks=turn.chunks)
        self.pipe.send(move)

    def answer(self, ends_s: float) -> tuple[int, Turn, Moved]:
        """Return the slot and turn of the next move that ended, and its answer; those nobody waits for are skipped."""
        while True:
            message = self.pipe.receive(ends_s)
            if isinstance(message, Moved) and (known := self.under_way.pop(message.turn, None)) is not None:
                return *known, message

    @contextmanager
    def retiring(self) -> Iterator[None]:
        """Retire the ring when something fails or a deadline is missed; no kernel of this lane runs afterwards."""
        try:
            yield
        except _TROUBLE as e:
            text = f"{self.direction}: {e}"
            self.retire(text)
            self._settle()
            raise RingRetiredError(text) from e

    def close(self) -> None:
        """End the lane's thread after what it waits for."""
        self._launched.put(None)
        self._thread.join()

    def _settle(self) -> None:
        """Kernels of this process wait for nobody else, so their end is near."""
        try:
            self.device.drain(self.direction)
        except CudaError:
            return  # the device is lost, and with it the blocks

    def _wait(self) -> None:
        try:
            self.device.use()
        except CudaError as e:
            self.retire(str(e))
        while (done := self._launched.get()) is not None:
            try:
                done()
            except _TROUBLE as e:
                self.retire(f"{self.direction}: {e}")


class StoreLane:
    """Gathers chunks into slots and lets the mover empty them. One job at a time."""

    def __init__(self, device: EngineDevice, pipe: Pipe[ToClient], retire: Callable[[str], None]) -> None:
        self._lane = _Lane(Direction.STORE, device, pipe, retire)

    def run(self, job: RingJob, ends_s: float) -> frozenset[int]:
        """Store a job's chunks; returns those that did not get there (cancelled, or not granted).

        Its blocks are free once ``job.cancel`` returned True, or when this returns or raises.

        Raises:
            RingRetiredError: time was up (*ends_s*, monotonic), or the mover or the device failed.
        """
        lane, failed = self._lane, set[int]()
        with lane.retiring():
            lane.device.use()
            if job.after:
                lane.device.follow(Direction.STORE, job.after)
            for turn in lane.device.turns(job.group, job.chunks):
                while not lane.free:
                    self._take(failed, ends_s)
                if job.begin():
                    self._launch(lane.free.popleft(), job, turn)
                else:
                    failed.update(turn.chunks)
            if job.read is not None:
                lane.then(job.read)
            while lane.under_way:
                self._take(failed, ends_s)
        return frozenset(failed)

    def close(self) -> None:
        """End the lane's thread."""
        self._lane.close()

    def _launch(self, slot: int, job: RingJob, turn: Turn) -> None:
        number = self._lane.number(slot, turn)
        self._lane.launch(slot, job, turn, lambda: self._lane.ask(number, slot, job, turn))

    def _take(self, failed: set[int], ends_s: float) -> None:
        slot, turn, moved = self._lane.answer(ends_s)
        self._lane.free.append(slot)
        if moved.error:
            failed.update(turn.chunks)


class LoadLane:
    """Lets the mover fill slots and scatters out of them. One job at a time."""

    def __init__(self, device: EngineDevice, pipe: Pipe[ToClient], retire: Callable[[str], None]) -> None:
        self._lane = _Lane(Direction.LOAD, device, pipe, retire)
        self._turns: deque[Turn] = deque()

    def run(self, job: RingJob, ends_s: float) -> frozenset[int]:
        """Load a job's chunks; returns those whose blocks were not written, or not all of them.

        Raises:
            RingRetiredError: time was up (*ends_s*, monotonic), or the mover or the device failed. Blocks of the job
                may have been written; none is written any more.
        """
        lane, failed = self._lane, set[int]()
        with lane.retiring():
            lane.device.use()
            if job.after:
                lane.device.follow(Direction.LOAD, job.after)
            self._turns = deque(lane.device.turns(job.group, job.chunks))
            left, last = len(self._turns), list[int]()
            for slot in range(lane.device.ring.slots):
                self._fill(slot, job)
            while left:
                left += self._take(job, failed, last, ends_s)
            for slot in last:
                lane.device.wait(Direction.LOAD, slot)
                job.end()
            if not job.cancel(max(0.0, ends_s - monotonic())):
                raise TimeoutError("a scatter did not end in time")
        return frozenset(failed)

    def close(self) -> None:
        """End the lane's thread."""
        self._lane.close()

    def _fill(self, slot: int, job: RingJob) -> None:
        """Ask for the job's next turn in a slot, if there is one. Either thread."""
        try:
            turn = self._turns.popleft()
        except IndexError:
            return
        self._lane.ask(self._lane.number(slot, turn), slot, job, turn)

    def _take(self, job: RingJob, failed: set[int], last: list[int], ends_s: float) -> int:
        """Scatter what the mover brought; kernels after which nothing is to be asked are put on the list of *last*.

        Returns how many more turns there are to take than before.
        """
        slot, turn, moved = self._lane.answer(ends_s)
        if moved.wrong:
            job.wrong.update(moved.wrong)
            failed.update(moved.wrong)
            rest = turn.without(moved.wrong)
            self._turns.extendleft(reversed(rest))
            self._fill(slot, job)
            return len(rest) - 1
        if moved.error or not job.begin():
            failed.update(turn.chunks)
            self._fill(slot, job)
        elif self._turns:
            self._lane.launch(slot, job, turn, lambda: self._fill(slot, job))
        else:
            self._lane.device.launch(Direction.LOAD, slot, job, turn)
            last.append(slot)
        return -1
