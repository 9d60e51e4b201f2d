# SPDX-License-Identifier: Apache-2.0
"""Watching through the official client: events come as they are sent, and everything that ends a watch says so."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from kvpool_operator.cluster import PODS, POOLS, Cluster
from kvpool_operator.errors import Busy, Forbidden

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def line(kind: str, **body: Any) -> bytes:
    return json.dumps({"type": kind, "object": body}).encode() + b"\n"


def run(handler: Handler, work: Callable[[Cluster], Awaitable[Any]]) -> Any:
    """Do *work* with a client of a loopback server that answers everything with *handler*."""

    async def within() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        configuration = Configuration()
        configuration.host = f"http://{host}:{port}"
        try:
            async with ApiClient(configuration) as api:
                return await work(Cluster(api))
        finally:
            await runner.cleanup()

    return asyncio.run(within())


async def events(cluster: Cluster) -> list[tuple[str, Any]]:
    return [event async for event in cluster.watch(POOLS, "models", "7")]


def sending(*lines: bytes, asked: list[dict[str, str]] | None = None) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        if asked is not None:
            asked.append({"path": request.path, **request.query})
        response = web.StreamResponse()
        await response.prepare(request)
        for data in lines:
            await response.write(data)
        return response

    return handler


def test_events_come_in_order_until_the_stream_ends() -> None:
    asked: list[dict[str, str]] = []

    found = run(sending(line("ADDED", a=1), line("BOOKMARK", b=2), asked=asked), events)

    assert found == [("ADDED", {"a": 1}), ("BOOKMARK", {"b": 2})]
    (query,) = asked
    assert query["path"] == "/apis/kvpool.dev/v1alpha1/namespaces/models/kvcachepools"
    assert (query["watch"], query["resourceVersion"], query["allowWatchBookmarks"]) == ("1", "7", "true")


def test_an_event_of_a_megabyte_is_one_event() -> None:
    (found,) = run(sending(line("ADDED", text="x" * 1_000_000)), events)

    assert len(found[1]["text"]) == 1_000_000


async def pods(cluster: Cluster) -> list[str]:
    return [pod["metadata"]["name"] async for pod in cluster.each(PODS, "models", "a=b")]


def test_pods_come_page_by_page() -> None:
    asked: list[dict[str, str]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(dict(request.query))
        first = "continue" not in request.query
        names, more = (("p1", "p2"), "here") if first else (("p3",), "")
        return web.json_response({"metadata": {"continue": more}, "items": [{"metadata": {"name": n}} for n in names]})

    assert run(handler, pods) == ["p1", "p2", "p3"]
    assert [(q["labelSelector"], q.get("continue")) for q in asked] == [("a=b", None), ("a=b", "here")]


def test_a_page_that_is_none_passes() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text='{"metadata": {}, "items": [')

    with pytest.raises(Busy):
        run(handler, pods)


def test_answers_are_asked_for_as_they_are() -> None:
    encodings: list[str | None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        encodings.append(request.headers.get("Accept-Encoding"))
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": []})

    run(handler, lambda cluster: cluster.list(POOLS))

    assert encodings == ["identity"]


@pytest.mark.parametrize(
    "handler",
    [
        sending(line("ADDED", a=1), line("ERROR", code=410, message="too old resource version")),
        sending(line("ADDED", a=1), b"{half"),
    ],
    ids=["error-event", "cut-off"],
)
def test_a_broken_stream_asks_for_a_new_list(handler: Handler) -> None:
    with pytest.raises(Busy, match="WATCH"):
        run(handler, events)


@pytest.mark.parametrize(("status", "error"), [(410, Busy), (500, Busy), (429, Busy), (403, Forbidden)])
def test_a_refused_watch_is_the_error_that_says_what_to_do(status: int, error: type[Exception]) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"message": "no"}, status=status)

    with pytest.raises(error, match="no"):
        run(handler, events)


def test_a_snapshot_has_the_version_to_watch_from() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "42"}, "items": [{"a": 1}]})

    assert run(handler, lambda cluster: cluster.snapshot(POOLS)) == ([{"a": 1}], "42")


def test_leaving_a_watch_half_way_closes_it() -> None:
    ended = []

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(line("ADDED", a=1))
                await asyncio.sleep(0)
        except (ConnectionError, asyncio.CancelledError):
            ended.append(True)
            raise

    async def first(cluster: Cluster) -> Any:
        watching = cluster.watch(POOLS, "", "1")
        found = await anext(watching)
        await watching.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            while not ended:  # noqa: ASYNC110 - the server has nobody to tell
                await asyncio.sleep(0.01)
        return found

    assert run(handler, first) == ("ADDED", {"a": 1})
