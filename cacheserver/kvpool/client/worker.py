# SPDX-License-Identifier: Apache-2.0
"""The worker's adapter: stores and loads of one rank, each ending once and in time, with or without a server."""

import logging
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvpool.client.call import Call
from kvpool.client.channel import Errand
from kvpool.client.jobs import Finished, LoadJob, StoreJob
from kvpool.client.lane import Lane
from kvpool.client.ledger import Ledger
from kvpool.client.link import Link
from kvpool.client.loading import Loading, blocks_of
from kvpool.client.ports import BlockPort
from kvpool.client.ringing import RingKeeper
from kvpool.client.state import LinkState
from kvpool.client.storing import Storing
from kvpool.config import ClientConfig
from kvpool.model.identity import Mode
from kvpool.model.keys import DIGEST_BYTES
from kvpool.model.layout import NOWHERE
from kvpool.wire.versions import MOVING

__all__ = ["WorkerAdapter"]

log = logging.getLogger("kvpool.client")

_MOST_BLOCKS: Final = 1 << 26
"""More blocks than any engine has."""


class WorkerAdapter:
    """Moves chunks between the engine's blocks and the server. One thread calls; only cancel and close wait.

    A store that cannot be done is dropped and counted. A load that cannot be done, or of which anything is unknown,
    reports its exact blocks as bad. Success is only what the server vouched for.
    """

    def __init__(
        self,
        link: Link,
        blocks: BlockPort,
        config: ClientConfig,
        *,
        rings: RingKeeper | None = None,
        queue_jobs: int = 1024,
    ) -> None:
        """Start the two transfer threads; *queue_jobs* bounds each one's queue; *rings*: what chunks may go through."""
        link.locks = blocks.locks
        self._rings = rings
        self._link = link
        self._blocks = blocks
        self._config = config
        self._ledger = Ledger()
        self._stores: Lane[Storing] = Lane("kvpool-store", queue_jobs)
        self._loads: Lane[Loading] = Lane("kvpool-load", queue_jobs)

    def store(self, job: StoreJob) -> None:
        """Begin a store: the question goes out now, the gather once ``job.ready`` is set."""
        self._ledger.begin_store(job.request_id)
        objection = self._objection_to_store(job)
        state = self._link.state
        errand = self._errand(state)
        if objection or errand is None:
            self._ledger.count(f"stores_dropped_{objection or 'uncached'}")
            log.debug("store of %s dropped: %s", job.request_id, objection or "uncached")
            job.gathered.set()
            self._ledger.end_reading(job.request_id)
            self._ledger.end_store(job.request_id)
            return
        work = Storing(errand, state.mode or Mode.STREAMED, self._blocks, job, self._ledger, self._rings)
        if self._stores.add(work):
            _follow(work.prepared, self._stores)
        else:
            work.abandon("queue")

    def load(self, job: LoadJob) -> None:
        """Begin a load."""
        self._ledger.begin_load(job.request_id)
        objection = self._objection_to_load(job)
        errand = self._errand(self._link.state)
        if objection or errand is None:
            self._ledger.count(f"loads_failed_{objection or 'uncached'}")
            log.debug("load of %s failed: %s", job.request_id, objection or "uncached")
            self._ledger.end_load(job.request_id, blocks_of(job, np.ones(len(job.block_ids), dtype=np.bool_)))
            return
        work = Loading(errand, self._blocks, job, self._ledger, self._rings)
        if self._loads.add(work):
            _follow(work.prepared, self._loads)
        else:
            work.abandon("queue")

    def poll(self, timeout_s: float = 0.0) -> Finished:
        """Return what ended since the last poll; each end is told once. Waits at most *timeout_s* for the first one."""
        self._stores.kick()
        return self._ledger.take(timeout_s)

    def has_stores(self, request_id: str) -> bool:
        """True while a store of the request is under way."""
        return self._ledger.has_stores(request_id)

    def cancel_stores(self, request_ids: Iterable[str], timeout_s: float) -> bool:
        """Let no store of these requests read blocks any more (they are about to be reused).

        Chunks gathered before are still committed. The stores end as usual.

        Returns:
            True: no gather reads their blocks. False: one was still running after *timeout_s*.
        """
        ids = frozenset(request_ids)
        return self._cancel(lambda work: work.job.request_id in ids, timeout_s)

    def settle_stores(self, jobs: Sequence[StoreJob], patience_s: float, timeout_s: float) -> bool:
        """Give the gathers of *jobs* some time, then let none of them read blocks any more, as ``cancel_stores``.

        Returns:
            True: no gather reads their blocks. False: one was still running after *timeout_s* more.
        """
        ends_s = monotonic() + patience_s
        left = [job for job in jobs if not job.gathered.wait(max(0.0, ends_s - monotonic()))]
        if not left:
            return True
        late = {id(job) for job in left}
        return self._cancel(lambda work: id(work.job) in late, timeout_s)

    def counters(self) -> dict[str, float]:
        """Return what was stored, loaded, dropped and lost since the start, with the reasons in the names."""
        return self._ledger.counts()

    def close(self, timeout_s: float) -> None:
        """End all jobs and the threads; waits at most *timeout_s*. Idempotent. Its owner closes the link afterwards."""
        ends_s = monotonic() + timeout_s
        for store in self._stores.close():
            store.cancel(ends_s - monotonic())
            store.abandon("closed")
        for load in self._loads.close():
            load.abandon("closed")
        self._cancel(lambda _: True, ends_s - monotonic())
        if self._rings is not None:
            self._rings.close(max(0.0, ends_s - monotonic()))
        self._stores.join(max(0.0, ends_s - monotonic()))
        self._loads.join(max(0.0, ends_s - monotonic()))
        self._ledger.wait_over(max(0.0, ends_s - monotonic()))

    def _cancel(self, which: Callable[[Storing], bool], timeout_s: float) -> bool:
        untouched, others = self._stores.withdraw(which)
        for work in untouched:
            work.abandon("cancelled")
        ends_s = monotonic() + timeout_s
        left = [work for work in others if not work.cancel(ends_s - monotonic())]
        return not left

    def _errand(self, state: LinkState) -> Errand | None:
        """Return the way to the session of *state*, or None while uncached."""
        if not state.healthy or state.welcome is None:
            return None
        welcome, ends_s = state.welcome, monotonic() + self._config.transfer_s
        return Errand(self._link, state.epoch, welcome.limits, ends_s, moving=MOVING in welcome.features)

    def _objection_to_store(self, job: StoreJob) -> str:
        if not self._link.role.stores:
            return "role"
        if len(job.digests) != len(job.block_ids) * DIGEST_BYTES or not _plain(job.block_ids):
            return "malformed"
        return ""

    def _objection_to_load(self, job: LoadJob) -> str:
        if not self._link.role.loads:
            return "role"
        if job.chunks != len(job.block_ids) or not _plain(job.block_ids, job.skip_blocks):
            return "malformed"
        return ""


def _follow(question: Call[Any], lane: Lane[Any]) -> None:
    """Let a lane look at its queue when a question is on its way, and when it is answered."""
    question.when_sent(lane.kick)
    question.then(lane.kick)


def _plain(block_ids: NDArray[np.int64], skip: int = 0) -> bool:
    """True for a table of distinct blocks (and NOWHERE); the first *skip* are not looked at."""
    if block_ids.ndim != 2 or not block_ids.size:  # noqa: PLR2004 - chunks by blocks
        return False
    used = block_ids.reshape(-1)[max(0, skip) :]
    used = used[used != NOWHERE]
    if not len(used):
        return True
    if used.min() < 0 or used.max() > _MOST_BLOCKS:
        return False
    marks = np.zeros(int(used.max()) + 1, dtype=np.bool_)
    marks[used] = True
    return int(np.count_nonzero(marks)) == len(used)
