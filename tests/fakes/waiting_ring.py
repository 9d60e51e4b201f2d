# SPDX-License-Identifier: Apache-2.0
"""A ring whose jobs are waited for, for tests that want one thing after the other."""

from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.ring import EngineRing, RingJob, RingRetiredError

__all__ = ["WaitingRing"]


class WaitingRing(EngineRing):
    """Calls return, or raise RingRetiredError, when all is over: the chunks that did not get there."""

    def store(self, job: RingJob, ends_s: float) -> frozenset[int]:
        return self._done(Direction.STORE, job, ends_s)

    def load(self, job: RingJob, ends_s: float) -> frozenset[int]:
        return self._done(Direction.LOAD, job, ends_s)

    def _done(self, direction: Direction, job: RingJob, ends_s: float) -> frozenset[int]:
        self.begin(direction, job, ends_s)
        job.finish()
        if job.lost is None:
            raise RingRetiredError(self.retired)
        return job.lost
