# SPDX-License-Identifier: Apache-2.0
"""The operator's HTTP face: probes for the kubelet, metrics for Prometheus. It only answers GET and knows no secret."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from kvpool_operator.metrics import CONTENT_TYPE
from kvpool_operator.settings import Settings

__all__ = ["serve"]


async def serve(settings: Settings, healthy: Callable[[], bool], exposition: Callable[[], bytes]) -> None:
    """Answer /healthz, /readyz and /metrics until cancelled.

    Args:
        settings: address and port.
        healthy: whether this replica does its work.
        exposition: all metrics in Prometheus' text format.

    Raises:
        OSError: the address cannot be taken.
    """

    async def probe(_: web.Request) -> web.Response:
        good = healthy()
        return web.Response(text="ok" if good else "stuck", status=200 if good else 503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=exposition(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/healthz", probe)
    app.router.add_get("/readyz", probe)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.http_host, settings.health_port).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
