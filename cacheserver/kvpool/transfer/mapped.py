# SPDX-License-Identifier: Apache-2.0
"""Mode mapped in the engine's process: the cache is exported to a mover, which then moves its blocks by itself.

What another process queued on the device cannot be drained from here. So whoever fails to get a mover's answer waits
until that mover does not exist any more, and only then lets go of the blocks: the server kills a mover whose client
says that it is retired, and movers die with their server.
"""

import itertools
import os
import select
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvpool.transfer.cuda import CudaError
from kvpool.transfer.jobs import EngineJob
from kvpool.transfer.lanes import RingRetiredError
from kvpool.transfer.mover.messages import (
    Cancel,
    Direction,
    Done,
    Export,
    Exported,
    Job,
    Join,
    Piece,
    ToClient,
)
from kvpool.transfer.pipe import Pipe, PipeClosedError
from kvpool.transfer.planes import LayoutError
from kvpool.transfer.ring import join_mover

__all__ = ["EngineCache", "MappedJob", "MappedMover"]


class EngineCache(Protocol):
    """The engine's cache, as it is shown to movers."""

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        """Export the memory that the cache lies in; descriptors (-1 for a piece with a handle) are the caller's.

        Raises:
            LayoutError: it cannot be exported.
        """

    def export(self) -> Export:
        """Describe what lies in the pieces."""

    def wait(self, event: int) -> None:
        """Block until an event of the engine's device happened; in a thread of ours.

        Raises:
            CudaError: the device failed.
        """


@dataclass(slots=True, eq=False)
class MappedJob(EngineJob):
    """A job that the mover does by itself. ``read`` is not called: blocks are free at the end."""

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stop: Callable[[], None] | None = None
    _ended: bool = False
    _cancelled: bool = False
    _void: bool = False

    def begin(self, stop: Callable[[], None]) -> bool:
        """Note that the mover is told of it now, and how to stop it; False if it may not be any more."""
        with self._changed:
            if not self._cancelled:
                self._stop = stop
            return not self._cancelled

    def end(self, lost: Collection[int] | None) -> None:
        """Note that nothing of it runs or will."""
        with self._changed:
            self.lost = lost if lost is None else frozenset(self.chunks if self._void else lost)
            self._stop, self._ended = None, True
            self._changed.notify_all()
        if self.over is not None:
            self.over()

    def is_over(self) -> bool:
        """True once it has ended."""
        return self._ended

    def cancel(self, timeout_s: float) -> bool:
        """Begin nothing any more; returns whether nothing runs after at most *timeout_s*. Any thread.

        If something does, its blocks may change under it, so nothing of the job counts.
        """
        with self._changed:
            self._cancelled, stop = True, self._stop
        if stop is not None:
            stop()
        with self._changed:
            idle = self._changed.wait_for(lambda: self._stop is None, max(0.0, timeout_s))
            self._void = not idle
            return idle


class MappedMover:
    """A mover that has mapped the engine's cache. Stores and loads run at the same time, each on one thread."""

    def __init__(
        self, cache: EngineCache, address: str, joins: Sequence[Join], ends_s: float, on_retired: Callable[[], None]
    ) -> None:
        """Join the mover at *address*, show it the cache and wait until it has mapped it.

        Args:
            cache: the engine's.
            address: ``unix:`` and a path.
            joins: for stores and for loads.
            ends_s: monotonic.
            on_retired: called once the mover is used no more, on any thread.

        Raises:
            RingRetiredError: it does not answer in time, or cannot map the cache.
            LayoutError: the cache cannot be exported.
        """
        self.retired = ""
        """Why it is not used any more; empty while it is."""
        self._lock = threading.Lock()
        self._on_retired = on_retired
        self._cache = cache
        self._numbers = itertools.count()
        self._pipes: dict[Direction, Pipe[ToClient]] = {}
        self._under_way: dict[Direction, dict[int, MappedJob]] = {d: {} for d in Direction}
        self._process = -1
        try:
            for join in joins:
                self._pipes[join.direction] = join_mover(address, join, ends_s)
            self._process = self._pipes[Direction.STORE].peer()
            self._show(ends_s)
        except (RingRetiredError, LayoutError) as e:
            self.close(str(e))
            raise
        except OSError as e:
            self.close(str(e))
            raise RingRetiredError(f"the mover does not map the cache: {e}") from e

    def gather(self, job: MappedJob) -> None:
        """Do nothing: it is the mover that reads blocks, and only those of a grant."""

    def forget(self, job: MappedJob) -> None:
        """Do nothing; see ``gather``."""

    def begin(self, direction: Direction, job: MappedJob, ends_s: float) -> None:
        """Tell the mover of a job, after the event that it waits for; others may follow before it has ended.

        It ends with the mover's answer, which ``job.finish`` takes, or that of a later job: then ``job.lost`` are the
        chunks that did not get there. If time is up (*ends_s*, monotonic) or the mover fails, it ends once that mover
        does not exist any more. One thread for each direction.
        """
        job.ends_s, job.finish = ends_s, lambda: self._finish(direction, job)
        pipe, number, under_way = self._pipes[direction], next(self._numbers), self._under_way[direction]
        if self.retired:
            job.end(None)
            return
        under_way[number] = job
        with self._failing(direction):
            if job.after:
                self._cache.wait(job.after)
            if job.begin(lambda: self._stop(pipe, number)):
                pipe.send(_message(number, job))
            else:
                del under_way[number]
                job.end(job.chunks)

    def retire(self, reason: str) -> None:
        """Use the mover no more: jobs under way end once it does not exist any more. Any thread; idempotent."""
        with self._lock:
            first, self.retired = not self.retired, self.retired or reason
        for pipe in self._pipes.values():
            pipe.close()
        if first:
            self._on_retired()

    def close(self, reason: str = "closed") -> None:
        """Retire it and let go of it. Not while a job runs. Idempotent."""
        self.retire(reason)
        with self._lock:
            process, self._process = self._process, -1
        if process >= 0:
            os.close(process)

    def _finish(self, direction: Direction, job: MappedJob) -> None:
        under_way = self._under_way[direction]
        with self._failing(direction):
            while not job.is_over():
                answer = self._pipes[direction].receive(min(j.ends_s for j in under_way.values()))
                if isinstance(answer, Done) and (known := under_way.pop(answer.job, None)) is not None:
                    known.wrong.update(answer.wrong)
                    known.end(answer.failed)

    @contextmanager
    def _failing(self, direction: Direction) -> Iterator[None]:
        """End all jobs of a direction when something fails or a deadline is missed, once nothing of them runs."""
        try:
            yield
        except (CudaError, PipeClosedError, TimeoutError) as e:
            self.retire(f"{direction}: {e}")
            self._wait_gone()
            jobs = [*self._under_way[direction].values()]
            self._under_way[direction].clear()
            for job in jobs:
                job.end(None)

    def _stop(self, pipe: Pipe[ToClient], number: int) -> None:
        try:
            pipe.send(Cancel(job=number))
        except PipeClosedError as e:
            self.retire(str(e))

    def _show(self, ends_s: float) -> None:
        if self._process < 0:
            raise RingRetiredError("this kernel gives no handle of the mover's process")
        pipe = self._pipes[Direction.STORE]
        for piece, descriptor in self._cache.pieces():
            try:
                pipe.send(piece, descriptor)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        pipe.send(self._cache.export())
        answer = pipe.receive(ends_s)
        if not isinstance(answer, Exported) or answer.error:
            raise RingRetiredError(f"the mover cannot map the cache: {getattr(answer, 'error', answer)}")

    def _wait_gone(self) -> None:
        """Wait for the mover's end: before that it may still read and write blocks."""
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        ended.poll()


def _message(number: int, job: MappedJob) -> Job:
    chunks = np.asarray(job.chunks, dtype=np.int64)
    ids = np.ascontiguousarray(job.ids[chunks], dtype="<i8").tobytes()
    return Job(job=number, group=job.group, grant=job.grant, chunks=tuple(chunks.tolist()), ids=ids)
