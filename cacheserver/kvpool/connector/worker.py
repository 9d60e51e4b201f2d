# SPDX-License-Identifier: Apache-2.0
"""The worker's half: carries out each step's plan and reports what ended.

A plain class that runs without the engine; the engine's worker thread calls it, in each step in this order:

    preempt (before anything of the step runs) -> begin -> [model] -> load -> saved -> results -> bad_blocks

Every planned load is reported exactly once, with the exact blocks that hold no valid data, whatever happens to the
server or to this code; every released request is reported once no store reads its blocks.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Final, Protocol

from kvpool.client.group import lookup_id_of
from kvpool.client.jobs import Finished, LoadJob, Moment, StoreJob
from kvpool.connector.groups import blocks_per_chunk
from kvpool.connector.patience import Patience
from kvpool.connector.plan import GroupFacts, PlannedLoad, StepPlan, block_array
from kvpool.model.identity import GroupKind, Role
from kvpool.model.keys import DIGEST_BYTES

__all__ = ["Transfers", "WorkerSide"]

IDLE_WAIT_S: Final = 0.001
"""An engine with nothing to run spins from one empty step to the next while it waits for the cache."""


class Transfers(Protocol):
    """The client's worker adapter."""

    def store(self, job: StoreJob) -> None:
        """Keep chunks; ends once, within the transfer deadline."""

    def load(self, job: LoadJob) -> None:
        """Load chunks; ends once, within the transfer deadline."""

    def poll(self) -> Finished:
        """Return what ended since the last call."""

    def has_stores(self, request_id: str) -> bool:
        """True while a store of the request may still read its blocks."""

    def cancel_stores(self, request_ids: Iterable[str], timeout_s: float) -> bool:
        """End stores; True once nothing reads their blocks any more."""

    def settle_stores(self, jobs: Sequence[StoreJob], patience_s: float, timeout_s: float) -> bool:
        """Give gathers some time, then end them; True once none of them reads its blocks any more."""

    def close(self, timeout_s: float) -> None:
        """End everything."""


class WorkerSide:
    """See the module."""

    def __init__(
        self,
        transfers: Transfers,
        *,
        place: tuple[int, int],
        writer: bool,
        role: Role,
        groups: Sequence[GroupFacts],
        timeout_s: float,
        moment: Callable[[], Moment | None] = lambda: None,
    ) -> None:
        """Make it.

        Args:
            transfers: the client's adapter.
            place: this rank's pipeline stage, and its part of the stage's chunks.
            writer: False if another rank stores the same part.
            role: which directions the engine may use.
            groups: this rank's cache groups, in the order of its registration.
            timeout_s: how long a gather that reads a preempted block is waited for.
            moment: returns where the engine's device is now; None where the host itself computes.
        """
        self._moment = moment
        self._transfers = transfers
        self._stage, self._shard = place
        self._stores = writer and role.stores
        self._groups = {group.number: (place, group) for place, group in enumerate(groups)}
        self._by_block = [group.kind for group in groups] in ([], [GroupKind.FULL])
        self._timeout_s = timeout_s
        self._ready: list[StoreJob] = []
        self._fleeting: list[StoreJob] = []
        """Stores out of groups whose blocks the engine takes back while the request runs."""
        self._patience = Patience()
        self._storing: set[str] = set()
        self._loading: dict[str, frozenset[int]] = {}
        self._loaded: set[str] = set()
        self._releasing: set[str] = set()
        self._bad: set[int] = set()
        self._failed: set[str] = set()
        self._bad_blocks = self._failed_loads = 0
        self._pause = threading.Event()
        self.off = False
        """True once this half has failed: it starts nothing any more."""

    def preempt(self, plan: StepPlan) -> None:
        """End all gathers of blocks that this step may overwrite.

        Raises:
            TimeoutError: a gather did not end; what it stored must never become visible.
        """
        ended = tuple(self._storing) if plan.off else tuple(r for r in plan.preempted if r in self._storing)
        if ended and not self._transfers.cancel_stores(ended, self._timeout_s):
            raise TimeoutError(f"stores of {len(ended)} preempted requests still read their blocks")
        self._storing.difference_update(ended)
        if self._fleeting and not (plan.idle and not plan.loads):
            self._settle()

    def begin(self, plan: StepPlan) -> None:
        """Ask where the step's stores go; their gathers wait for ``saved``."""
        self._releasing.update(plan.released)
        for planned in plan.stores if self._stores and not self.off else ():
            place, group = self._groups.get(planned.group, (0, None))
            if group is None:
                continue
            job = StoreJob(
                request_id=planned.request_id,
                group=place,
                shard=self._shard,
                first=planned.first,
                parent=planned.parent,
                digests=planned.digests,
                block_ids=block_array(planned.blocks, len(planned.digests) // DIGEST_BYTES),
            )
            self._ready.append(job)
            if group.kind is not GroupKind.FULL:
                self._fleeting.append(job)
            self._storing.add(planned.request_id)
            self._transfers.store(job)

    def load(self, plan: StepPlan) -> None:
        """Start the step's loads."""
        self._begin_loads(plan)
        if self.off or not plan.chunk_tokens:
            for request_id in {planned.request_id for planned in plan.loads}:
                self._end_load(request_id, self._loading[request_id])
            return
        mine = [planned for planned in plan.loads if planned.group in self._groups]
        moment = self._moment() if mine else None
        for job in [self._job(planned, plan.chunk_tokens, moment) for planned in mine]:
            self._transfers.load(job)
        # A pipeline stage may have none of a load's groups.
        for request_id in {planned.request_id for planned in plan.loads} - {planned.request_id for planned in mine}:
            self._end_load(request_id, frozenset())

    def saved(self, *, ran: bool) -> None:
        """The step's model has run and its blocks are final; if it failed (*ran* is False) they hold nothing to keep.

        Raises:
            TimeoutError: stores of the failed step could not be ended.
        """
        jobs, self._ready = self._ready, []
        if jobs and not ran and not self._transfers.cancel_stores({job.request_id for job in jobs}, self._timeout_s):
            raise TimeoutError("stores of a failed step could not be ended")
        moment = self._moment() if jobs else None
        for job in jobs:
            job.after = moment
            job.ready.set()

    def results(self, *, idle: bool, asking: bool = False) -> tuple[set[str], set[str]]:
        """Return released requests that no store reads any more, and requests whose loads ended."""
        self._collect()
        sent = {r for r in self._releasing if not self._transfers.has_stores(r)}
        if idle and not sent and not self._loaded and (asking or self._loading or self._releasing):
            self._pause.wait(IDLE_WAIT_S)
        self._releasing -= sent
        self._storing -= sent
        loaded, self._loaded = self._loaded, set()
        return sent, loaded

    def bad_blocks(self) -> set[int]:
        """Return the blocks that failed loads left without valid data, once; none where requests are named instead."""
        bad, self._bad = self._bad, set()
        return bad if self._by_block else set()

    def failed_requests(self) -> set[str]:
        """Return the requests whose loads failed, once; none where blocks are named instead."""
        failed, self._failed = self._failed, set()
        return set() if self._by_block else failed

    def take_over(self, plan: StepPlan) -> None:
        """Note what a step of this half, now failed, would have had to report."""
        self.off = True
        self._releasing.update(plan.released)
        self._begin_loads(plan)

    def abandon(self) -> tuple[set[str], set[str]]:
        """Report as ``results`` does after a failure of this half: everything ends.

        Waits for running copies, since the engine will use the blocks for something else.
        """
        self.off = True
        if self._loading or self._storing or self._releasing:
            self._transfers.close(self._timeout_s)
        for request_id, blocks in tuple(self._loading.items()):
            self._end_load(request_id, blocks)
        sent, loaded = self._releasing, self._loaded
        self._releasing, self._storing, self._loaded, self._ready, self._fleeting = set(), set(), set(), [], []
        return sent, loaded

    def counters(self) -> dict[str, float]:
        """Return what happened since the start, and how many loads run now."""
        return {
            "failed_loads": self._failed_loads,
            "bad_blocks": self._bad_blocks,
            "loads_in_flight": len(self._loading),
        }

    def _settle(self) -> None:
        """The engine may have given blocks outside of windows, and old states, to others: nothing may read them now.

        Such stores have the time since their step, and a small part of the engine's own besides: what the server did
        not answer by then is not kept.
        """
        jobs, self._fleeting = [job for job in self._fleeting if not job.gathered.is_set()], []
        if not jobs:
            return
        began_s = monotonic()
        if not self._transfers.settle_stores(jobs, self._patience.left_s(began_s), self._timeout_s):
            raise TimeoutError(f"{len(jobs)} stores still read blocks that the engine may have taken back")
        self._patience.spent(monotonic() - began_s)

    def _begin_loads(self, plan: StepPlan) -> None:
        for planned in plan.loads:
            before = self._loading.get(planned.request_id, frozenset())
            self._loading[planned.request_id] = before | _written(planned)

    def _collect(self) -> None:
        for request_id, bad in self._transfers.poll().loaded.items():
            self._end_load(request_id, bad)

    def _end_load(self, request_id: str, bad: frozenset[int]) -> None:
        if self._loading.pop(request_id, None) is None:
            return
        self._loaded.add(request_id)
        self._bad |= bad
        if bad:
            self._failed.add(request_id)
        self._bad_blocks += len(bad)
        self._failed_loads += bool(bad)

    def _job(self, planned: PlannedLoad, chunk_tokens: int, moment: Moment | None) -> LoadJob:
        place, group = self._groups[planned.group]
        blocks = block_array(planned.blocks, planned.end - planned.first)
        if blocks.shape[1] != blocks_per_chunk(group, chunk_tokens) or chunk_tokens % group.block_tokens:
            raise ValueError(f"{blocks.shape[1]} blocks of {group.block_tokens} tokens are no chunk of {chunk_tokens}")
        return LoadJob(
            request_id=planned.request_id,
            lookup_id=lookup_id_of(planned.lookup_id, self._stage),
            group=place,
            shard=self._shard,
            first=planned.first,
            end=planned.end,
            block_ids=blocks,
            after=moment,
            skip_blocks=planned.skip_blocks,
        )


def _written(planned: PlannedLoad) -> frozenset[int]:
    """Blocks that a load writes."""
    blocks = block_array(planned.blocks, planned.end - planned.first)
    return frozenset(blocks.ravel()[planned.skip_blocks :].tolist())
