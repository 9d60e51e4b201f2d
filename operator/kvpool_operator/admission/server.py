# SPDX-License-Identifier: Apache-2.0
"""One replica of the admission server: answers the API server over TLS, probes and metrics beside it."""

import asyncio
import datetime as dt
import logging
import signal
import time
from http import HTTPStatus
from typing import Final

from aiohttp import web

from kvpool_operator.admission.certificates import Keeper
from kvpool_operator.admission.pools import Pools
from kvpool_operator.admission.review import BadReviewError, Reviewer
from kvpool_operator.admission.settings import WebhookSettings
from kvpool_operator.cluster import Cluster
from kvpool_operator.metrics import ADMISSION, CONTENT_TYPE, Metrics
from kvpool_operator.process import api_client, log_as_json

__all__ = ["PATHS", "Webhook", "run"]

_log = logging.getLogger("kvpool.webhook")

PATHS: Final = {"/wire": False, "/wire-with-host-folders": True}
"""Path of a hook, and whether namespaces that it is for let pods mount folders of the node."""
_MOST_BYTES: Final = 4 << 20
"""Above what etcd can hold of a pod, with its former state beside it."""
_SHUTDOWN_S: Final = 5.0
_IDLE_S: Final = 3600.0
"""An API server ends idle connections after 90 s. If we did so first, it might send a review into one that ends."""


class Webhook:
    """One replica. One event loop."""

    def __init__(self, cluster: Cluster, settings: WebhookSettings) -> None:
        self._settings = settings
        self._pools = Pools(cluster, settings.watch_namespaces)
        self._certificates = Keeper(cluster, settings, lambda: dt.datetime.now(dt.UTC))
        self._review = Reviewer(self._pools.get, settings.payload_image)
        self._metrics = Metrics(ADMISSION)
        self._leaving = False

    async def run(self) -> None:
        """Answer until a signal; then go on until nobody sends any more.

        Raises:
            ExceptionGroup: a part failed for good; the process must end.
        """
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        async with asyncio.TaskGroup() as tasks:
            parts = [
                tasks.create_task(self._pools.run()),
                tasks.create_task(self._certificates.run()),
                tasks.create_task(self._serve_probes()),
                tasks.create_task(self._serve_reviews()),
            ]
            await stopping.wait()
            self._leaving = True  # not ready from now on; connections are given up one by one, after their answers
            await asyncio.sleep(self._settings.linger_s)
            for part in parts:
                part.cancel()

    @property
    def ready(self) -> bool:
        """True if pods that are sent here are wired: pools are known, and the API server trusts the certificate."""
        return not self._leaving and self._pools.synced and self._certificates.trusted

    async def _serve_reviews(self) -> None:
        await self._certificates.loaded.wait()
        app = web.Application(client_max_size=_MOST_BYTES)
        for path in PATHS:
            app.router.add_post(path, self._answer)
        await _serve(app, self._settings.host, self._settings.port, self._certificates)

    async def _serve_probes(self) -> None:
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._exposition)
        await _serve(app, self._settings.http_host, self._settings.health_port, None)

    async def _answer(self, request: web.Request) -> web.Response:
        begun_s = time.perf_counter()
        try:
            reviewed = self._review(await request.read(), host_folders=PATHS[request.path])
        except BadReviewError as e:
            self._metrics.count("kvpool_webhook_reviews_total", "bad")
            return web.Response(status=HTTPStatus.BAD_REQUEST, text=str(e))
        response = web.Response(body=reviewed.body, content_type="application/json")
        if self._leaving:
            response.force_close()
        self._metrics.count("kvpool_webhook_reviews_total", reviewed.result)
        self._metrics.time("kvpool_webhook_review_seconds", time.perf_counter() - begun_s)
        return response

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self.ready:
            return web.Response(text="ok")
        parts = {
            "leaving": self._leaving,
            "pools not listed yet": not self._pools.synced,
            "the published bundle does not verify the certificate": not self._certificates.trusted,
        }
        return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text="; ".join(t for t, bad in parts.items() if bad))

    async def _exposition(self, _: web.Request) -> web.Response:
        self._metrics.put("kvpool_webhook_ready", self.ready)
        self._metrics.put("kvpool_webhook_certificate_remaining_seconds", self._certificates.remaining_s())
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def _serve(app: web.Application, host: str, port: int, certificates: Keeper | None) -> None:
    """Serve *app* until cancelled, then finish what was begun."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S, keepalive_timeout=_IDLE_S)
    await runner.setup()
    try:
        context = certificates.context if certificates else None
        await web.TCPSite(runner, host or None, port, ssl_context=context).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def run(settings: WebhookSettings) -> None:
    """Log in, then run one replica until a signal.

    Raises:
        ExceptionGroup: a part failed for good; the process must end.
    """
    log_as_json()
    async with api_client() as api:
        await Webhook(Cluster(api), settings).run()
