# SPDX-License-Identifier: Apache-2.0
"""The two lanes of a ring, each with its slots, its stream, its connection to the mover and a thread that waits.

A lane's jobs are run by its caller's thread: it launches kernels as far ahead as slots are free and takes the mover's
answers. The next job may begin once the last turn of one is on its way, so that no slot stands idle between two. The
lane's own thread waits for the kernels' events in their order and tells the mover. No stream of the engine ever waits
for the mover: what does not come costs a deadline.
"""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
        self.under_way: dict[int, tuple[int, RingJob, Turn]] = {}
        self._jobs: list[RingJob] = []
        self._numbers = itertools.count()
        self._launched: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name=f"kvpool-ring-{direction}", daemon=True)
        self._thread.start()

    def start(self, job: RingJob, ends_s: float, finish: Callable[[RingJob], None]) -> None:
        """Begin a job."""
        job.start(ends_s, partial(finish, job))
        self._jobs = [job, *(j for j in self._jobs if not j.is_over)]
        if not job.gathered:
            self.follow(job)

    def follow(self, job: RingJob) -> None:
        """Let the kernels that are launched from now on begin after what the job follows."""
        self.device.use()
        if job.after:
            self.device.follow(self.direction, job.after)

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

    def number(self, slot: int, job: RingJob, turn: Turn) -> int:
        """Note a move before the mover can answer it."""
        number = next(self._numbers)
        self.under_way[number] = (slot, job, turn)
        return number

    def ask(self, number: int, slot: int, job: RingJob, turn: Turn) -> None:
        """Tell the mover."""
        part = turn.part
        move = Move(turn=number, slot=slot, grant=job.grant, offset=part.offset, length=part.length, chunks=turn.chunks)
        self.pipe.send(move)

    def answer(self) -> tuple[int, RingJob, Turn, Moved]:
        """Return slot, job and turn of the next move that ended, and its answer; others that come are skipped.

        Raises:
            TimeoutError: the time of a job is up.
            PipeClosedError: there will be no answer.
        """
        ends_s = min([job.ends_s for job in self._jobs if not job.is_over], default=0.0)
        while True:
            message = self.pipe.receive(ends_s)
            if isinstance(message, Moved) and (known := self.under_way.pop(message.turn, None)) is not None:
                return *known, message

    @contextmanager
    def retiring(self) -> Iterator[None]:
        """Retire the ring when something fails or a deadline is missed: all jobs end, and no kernel runs any more."""
        try:
            yield
        except _TROUBLE as e:
            self._fail(str(e))
        except BaseException:
            self._fail("a defect of the client")
            raise

    def _fail(self, why: str) -> None:
        self.retire(f"{self.direction}: {why}")
        self._settle()
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.stop()

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
    """Gathers chunks into slots and lets the mover empty them. Jobs run one after the other; one thread calls."""

    def __init__(self, device: EngineDevice, pipe: Pipe[ToClient], retire: Callable[[str], None]) -> None:
        self._lane = _Lane(Direction.STORE, device, pipe, retire)

    def gather(self, job: RingJob) -> None:
        """Gather a job's first chunks before its grant is known, into no more than half of the slots.

        The rest is left to jobs that begin before it. ``begin`` goes on with it, or ``forget`` gives it up.
        """
        lane = self._lane
        room = len(lane.free) - lane.device.ring.slots // 2
        with lane.retiring():
            lane.follow(job)
            for turn in itertools.islice(lane.device.turns(job.group, job.chunks), max(0, room)):
                if not job.begin():
                    return
                job.gathered.append((slot := lane.free.popleft(), turn))
                lane.launch(slot, job, turn, lambda: None)

    def forget(self, job: RingJob) -> None:
        """Give up what was only gathered. Any thread: the next kernel of a slot follows the last one in its stream."""
        gathered, job.gathered = job.gathered, []
        self._lane.free.extend(slot for slot, _ in gathered)

    def begin(self, job: RingJob, ends_s: float) -> None:
        """Gather a job's chunks and let the mover have them; returns once the last kernel is launched.

        The job ends with its last answer, which is taken by ``job.finish`` or when a later job needs slots. Then
        ``job.lost`` are the chunks that did not get there (cancelled, or not granted). Its blocks are free once
        ``job.cancel`` returned True, or at its end. It ends with the ring if time is up (*ends_s*, monotonic) or
        something fails.
        """
        lane = self._lane
        with lane.retiring():
            lane.start(job, ends_s, self._finish)
            gathered, job.gathered = job.gathered, []
            for slot, turn in gathered:
                job.expect(1)
                number = lane.number(slot, job, turn)
                lane.device.wait(Direction.STORE, slot)
                lane.ask(number, slot, job, turn)
            for turn in itertools.islice(lane.device.turns(job.group, job.chunks), len(gathered), None):
                job.expect(1)
                while not lane.free:
                    self._take()
                if job.begin():
                    self._launch(lane.free.popleft(), job, turn)
                else:
                    job.ended(turn.chunks)
            if job.read is not None:
                lane.then(job.read)
            job.ended()

    def close(self) -> None:
        """End the lane's thread."""
        self._lane.close()

    def _finish(self, job: RingJob) -> None:
        with self._lane.retiring():
            while not job.is_over:
                self._take()

    def _launch(self, slot: int, job: RingJob, turn: Turn) -> None:
        number = self._lane.number(slot, job, turn)
        self._lane.launch(slot, job, turn, lambda: self._lane.ask(number, slot, job, turn))

    def _take(self) -> None:
        slot, job, turn, moved = self._lane.answer()
        self._lane.free.append(slot)
        job.ended(turn.chunks if moved.error else ())


class LoadLane:
    """Lets the mover fill slots and scatters out of them. Jobs run one after the other; one thread calls."""

    def __init__(self, device: EngineDevice, pipe: Pipe[ToClient], retire: Callable[[str], None]) -> None:
        self._lane = _Lane(Direction.LOAD, device, pipe, retire)
        self._filling = threading.Lock()
        self._turns: deque[tuple[RingJob, Turn]] = deque()

    def begin(self, job: RingJob, ends_s: float) -> None:
        """Load a job's chunks; returns once the mover was asked for the last of them.

        The job ends with its last kernel: ``job.lost`` are then the chunks whose blocks were not written, or not all of
        them. It ends with the ring if time is up (*ends_s*, monotonic) or something fails: blocks may have been written
        then, and none is written any more.
        """
        lane = self._lane
        with lane.retiring():
            lane.start(job, ends_s, self._finish)
            self._want(job, list(lane.device.turns(job.group, job.chunks)))
            while self._is_asking():
                self._take()
            job.ended()

    def close(self) -> None:
        """End the lane's thread."""
        self._lane.close()

    def _finish(self, job: RingJob) -> None:
        lane, last = self._lane, list[tuple[int, RingJob]]()
        with lane.retiring():
            while job.unanswered and not job.is_over:
                self._take(last)
            for slot, other in last:
                lane.device.wait(Direction.LOAD, slot)
                other.end()
                self._end_turn(slot, other)
            job.wait_over()

    def _want(self, job: RingJob, turns: Sequence[Turn]) -> None:
        """Put turns before all others that wait, and ask for as many as there are free slots."""
        job.expect(len(turns))
        job.unanswered += len(turns)
        with self._filling:
            self._turns.extendleft((job, turn) for turn in reversed(turns))
            free = [self._lane.free.popleft() for _ in range(min(len(self._turns), len(self._lane.free)))]
        for slot in free:
            self._fill(slot)

    def _is_asking(self) -> bool:
        """True while there are turns that are not under way."""
        with self._filling:
            return bool(self._turns)

    def _fill(self, slot: int) -> None:
        """Ask for the next turn in a slot; it is free if there is none. Either thread."""
        with self._filling:
            if not self._turns:
                self._lane.free.append(slot)
                return
            job, turn = self._turns.popleft()
            number = self._lane.number(slot, job, turn)
        self._lane.ask(number, slot, job, turn)

    def _take(self, last: list[tuple[int, RingJob]] | None = None) -> None:
        """Scatter what the mover brought.

        A kernel behind which nothing is to be asked goes on the list of *last*: the lane's thread need not wake for it.
        """
        slot, job, turn, moved = self._lane.answer()
        job.unanswered -= 1
        if moved.wrong:
            job.wrong.update(moved.wrong)
            self._want(job, turn.without(moved.wrong))
            self._end_turn(slot, job, moved.wrong)
        elif moved.error or not job.begin():
            self._end_turn(slot, job, turn.chunks)
        elif last is None or self._is_asking():
            self._lane.launch(slot, job, turn, partial(self._end_turn, slot, job))
        else:
            self._lane.device.launch(Direction.LOAD, slot, job, turn)
            last.append((slot, job))

    def _end_turn(self, slot: int, job: RingJob, lost: Collection[int] = ()) -> None:
        self._fill(slot)
        job.ended(lost)
