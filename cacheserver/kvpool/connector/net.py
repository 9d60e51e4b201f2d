# SPDX-License-Identifier: Apache-2.0
"""One net for failures under both halves of the connector, and their numbers.

Nothing of ours may fail an engine. The first exception in a half is logged with its traceback and turns that half off:
the scheduler's then answers misses and tells all workers to end their stores; a worker's reports every load as bad and
every block as released. The engine goes on uncached until its restart, visibly (``kvpool_uncached{reason="failed"}``).
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvpool.connector.attach import Attachment
from kvpool.connector.servers import Servers
from kvpool.connector.statistics import Sampler

__all__ = ["Half"]

T = TypeVar("T")

log = logging.getLogger("kvpool.connector")


class Half:
    """The net, and the numbers."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._faults = 0
        self.attachment: Attachment | Servers | None = None
        self.refusal = ""
        """Why this engine is not cached at all, in words."""
        self.off = False
        self._sampler = Sampler(name, lambda: self._faults_alone() if self.off else self._totals(), self._uncached)

    def _guarded(self, step: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Run *step*; after a failure, now or before, *otherwise*."""
        if not self.off:
            try:
                return step()
            except Exception:
                self._faults += 1
                self.off = True
                log.exception("kvpool: the connector's %s half failed; the engine runs uncached", self._name)
        return otherwise()

    def _totals(self) -> Mapping[str, float]:
        return self._faults_alone()

    def _faults_alone(self) -> Mapping[str, float]:
        """All that can still be counted after a failure."""
        return {"faults": self._faults}

    def _uncached(self) -> str:
        if self.off:
            return "failed"
        if self.refusal:
            return "unsupported"
        return str(self.attachment.uncached() or "") if self.attachment is not None else "starting"

    def sample(self) -> dict[str, Any]:
        """Return what there is to count since the last call."""
        return self._guarded(self._sampler.sample, self._sampler.sample)
