# SPDX-License-Identifier: Apache-2.0
"""The controller process: watches on every replica, work on the one that holds the Lease."""

import asyncio
import datetime as dt
import functools
import logging
import random
import signal
import time

import aiohttp
from kubernetes.aio.client import ApiClient

from kvpool_operator import face, handlers, observe
from kvpool_operator.cluster import POOLS, Cluster
from kvpool_operator.errors import OperatorError
from kvpool_operator.events import Poster
from kvpool_operator.kept import Part
from kvpool_operator.lease import Lease
from kvpool_operator.metrics import READY, Metrics
from kvpool_operator.observed import ServerPod, ServerStats
from kvpool_operator.process import api_client, log_as_json
from kvpool_operator.queue import Need, Queue, Schedule
from kvpool_operator.reconcile import Key, Reconciler
from kvpool_operator.repair import Repair
from kvpool_operator.settings import Settings
from kvpool_operator.supervise import supervise
from kvpool_operator.surroundings import Surroundings

__all__ = ["Controller", "run"]

_log = logging.getLogger("kvpool.operator")
_GAP_S = 1.0
_STUCK_S = 300.0


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class Controller:
    """One replica. One event loop."""

    def __init__(self, api: ApiClient, session: aiohttp.ClientSession, settings: Settings) -> None:
        self._settings = settings
        self._session = session
        self.metrics = Metrics()
        self._cluster = Cluster(api, self.metrics.called)
        surroundings = Surroundings(self._cluster, settings, time.monotonic)
        poster = Poster(self._cluster, settings.identity, _now)
        self.reconciler = Reconciler(
            self._cluster,
            settings,
            surroundings,
            self._read_stats,
            time.monotonic,
            _now,
            self._report,
            poster,
            self._passed,
            Repair(self._cluster, _now, poster.unwired, self._evicted),
        )
        schedule: Schedule[Key] = Schedule(
            gap_s=_GAP_S, report_gap_s=settings.status_gap_s, parallel=settings.parallel, jitter=random.random
        )
        self.queue: Queue[Key] = Queue(schedule, self.reconciler, time.monotonic)
        self._resynced_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._stop_watches = handlers.Stop()
        self.watcher = handlers.Watcher(self._ask)
        self.lease = Lease(
            self._cluster,
            settings.namespace,
            settings.identity,
            settings.lease_s,
            time.monotonic,
            _now,
            settings.lease,
        )

    async def run(self) -> None:
        """Run until a signal; then the Lease is given back first, so that the next replica need not wait.

        Raises:
            ExceptionGroup: of LeaseLostError or KeepsFailingError; the process must end.
        """
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                leading = tasks.create_task(self._lead())
                health = tasks.create_task(face.serve(self._settings, self.healthy, self._exposition))
                watching = tasks.create_task(self._watch())
                await stopping.wait()
                leading.cancel()
                await self.lease.release()
                self._stop_watches.set()
                await watching
                health.cancel()
        finally:
            self._stop_watches.set()
            await self.lease.release()

    async def _watch(self) -> None:
        def watch() -> None:
            handlers.operate(self.watcher, self._settings, self._stop_watches)

        await supervise(lambda: asyncio.to_thread(watch), self._again, time.monotonic)

    def _ask(self, key: Key, need: Need, part: Part) -> None:
        """Any thread."""
        self._loop.call_soon_threadsafe(functools.partial(self._asked, key, need, part))

    def _asked(self, key: Key, need: Need, part: Part) -> None:
        self.reconciler.changed(key, part)
        self.queue.add(key, need)

    async def _lead(self) -> None:
        await self.lease.acquire()
        _log.info("lease.acquired", extra={"fields": {"identity": self._settings.identity}})
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.lease.keep())
            tasks.create_task(self.queue.run())
            tasks.create_task(self._resync())

    async def _resync(self) -> None:
        """Name every pool that exists, as the API server says, at the start and ever again."""
        while True:
            rest_s = self._settings.resync_s
            try:
                for namespace in self._settings.watch_namespaces or ("",):
                    found = await self._cluster.list(POOLS, namespace, metadata_only=True)
                    self.queue.add_all((p["metadata"]["namespace"], p["metadata"]["name"]) for p in found)
                self.queue.add_all(self.reconciler.keys())  # those that are gone are then forgotten
                self._resynced_s = time.monotonic()
            except OperatorError as e:
                _log.warning("resync.failed", extra={"fields": {"error": str(e)}})
                rest_s = min(rest_s, 5.0)
            await asyncio.sleep(rest_s)

    async def _read_stats(self, port: int, pods: tuple[ServerPod, ...]) -> tuple[ServerStats, ...]:
        return await observe.read_stats(self._session, self._settings.stats_url, port, pods)

    def _passed(self, result: str, seconds: float) -> None:
        self.metrics.count("kvpool_operator_reconciles_total", result)
        self.metrics.time("kvpool_operator_reconcile_seconds", seconds)

    def _again(self, error: BaseException) -> None:
        self.metrics.count("kvpool_operator_watch_restarts_total")
        _log.warning("watches.failed", extra={"fields": {"error": repr(error)}})
        self.watcher.forget()

    def _evicted(self) -> None:
        self.metrics.count("kvpool_operator_evictions_total")

    def _report(self, event: str, key: Key, text: str) -> None:
        _log.info(event, extra={"fields": {"namespace": key[0], "pool": key[1], "text": text}})

    def healthy(self) -> bool:
        """True while the queue moves and, on the leader, resyncs happen."""
        stale = self.lease.held and time.monotonic() - self._resynced_s > 3 * self._settings.resync_s
        return not stale and not (self.lease.held and self.queue.oldest_wait_s() > _STUCK_S)

    def _exposition(self) -> bytes:
        """All metrics, with what is true at this moment."""
        metrics, fleet = self.metrics, self.reconciler.fleet()
        known, due = self.queue.depth()
        metrics.put("kvpool_operator_queue_known", known)
        metrics.put("kvpool_operator_queue_due", due)
        metrics.put("kvpool_operator_queue_oldest_wait_seconds", self.queue.oldest_wait_s())
        metrics.put("kvpool_operator_leader", self.lease.held)
        metrics.put("kvpool_operator_resync_age_seconds", time.monotonic() - self._resynced_s)
        metrics.put("kvpool_operator_unwired_pods", fleet.unwired)
        for ready in READY:
            metrics.put("kvpool_operator_pools", fleet.pools.get(ready, 0), ready)
        return metrics.exposition()


async def run(settings: Settings) -> None:
    """Log in, then run one replica until a signal.

    Raises:
        LeaseLostError, KeepsFailingError: the process must end.
    """
    log_as_json()
    async with api_client() as api, aiohttp.ClientSession() as session:
        await Controller(api, session, settings).run()
