# SPDX-License-Identifier: Apache-2.0
"""An API server that misbehaves: a proxy on loopback before the real one, whose faults a test switches on and off."""

import asyncio
import json
import random
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml
from aiohttp import web
from tests.cluster.control_plane import ControlPlane

__all__ = ["Faults", "proxy"]

_HOP = {"Host", "Authorization", "Connection", "Content-Length", "Transfer-Encoding", "Accept-Encoding"}


@dataclass
class Faults:
    """What goes wrong now. Set by the test's thread, read by the proxy's; single assignments only."""

    kubeconfig: Path
    """For clients of the proxy."""
    status: int = 0
    """Answer every call with this."""
    watch_status: int = 0
    """Answer every watch with this."""
    mute: bool = False
    """Watches stay open and say nothing; what happens meanwhile is lost to them."""
    drop: float = 0.0
    """Share of watch events that get lost."""
    swap: bool = False
    """Every second event comes before the one before it."""
    broken: int = 0
    """Streams that were ended by an injected error, or calls that were refused."""
    _inject: list[asyncio.Queue[bytes]] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop | None = None

    def streams(self) -> int:
        """Watches that are open now."""
        return len(self._inject)

    def inject(self, code: int, message: str) -> int:
        """Send an ERROR into every open watch; returns to how many."""
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}
        line = json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
        assert self._loop is not None
        queues = list(self._inject)
        for queue in queues:
            self._loop.call_soon_threadsafe(queue.put_nowait, line)
        self.broken += len(queues)
        return len(queues)


class _Proxy:
    """Forwards everything; watches line by line."""

    def __init__(self, faults: Faults, server: str, tls: ssl.SSLContext) -> None:
        self._faults = faults
        self._server = server
        self._tls = tls
        self._random = random.Random(1)
        self.session: aiohttp.ClientSession

    async def handle(self, request: web.Request) -> web.StreamResponse:
        watches = request.query.get("watch") == "true"
        if status := self._faults.status or (self._faults.watch_status if watches else 0):
            self._faults.broken += 1
            return web.json_response({"kind": "Status", "code": status}, status=status)
        headers = {k: v for k, v in request.headers.items() if k not in _HOP}
        call = self.session.request(
            request.method,
            self._server + request.raw_path,
            headers=headers,
            data=await request.read() or None,
            ssl=self._tls,
        )
        async with call as upstream:
            if watches and upstream.status == 200:
                return await self._watch(request, upstream)
            body = await upstream.read()
            kept = {k: v for k, v in upstream.headers.items() if k in ("Content-Type", "Retry-After")}
            return web.Response(status=upstream.status, body=body, headers=kept)

    async def _watch(self, request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._faults._inject.append(lines)
        reading = asyncio.create_task(self._read(upstream, lines))
        try:
            while line := await lines.get():
                await response.write(line)
                if b'"type": "ERROR"' in line:
                    break
        except ConnectionResetError:
            pass  # the client went first
        finally:
            self._faults._inject.remove(lines)
            reading.cancel()
        return response

    async def _read(self, upstream: aiohttp.ClientResponse, lines: asyncio.Queue[bytes]) -> None:
        held = b""
        try:
            async for line in upstream.content:
                if self._faults.mute or self._random.random() < self._faults.drop:
                    continue
                if self._faults.swap and not held:
                    held = line
                    continue
                for part in (line, held):
                    if part:
                        lines.put_nowait(part)
                held = b""
        finally:
            lines.put_nowait(b"")


@contextmanager
def proxy(control_plane: ControlPlane, user: str) -> Iterator[Faults]:
    """A proxy through which every client is *user*, with all rights."""
    real = yaml.safe_load(control_plane.kubeconfig(user, ("system:masters",)).read_text())
    tls = ssl.create_default_context(cafile=str(control_plane.authority.file))
    tls.load_cert_chain(*real["users"][0]["user"].values())
    faults = Faults(control_plane.folder / "pki" / f"{user}-proxy.kubeconfig")
    ready, stop = threading.Event(), asyncio.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(faults, control_plane.server, tls, ready, stop)))
    thread.start()
    assert ready.wait(10)
    try:
        yield faults
    finally:
        assert faults._loop is not None
        faults._loop.call_soon_threadsafe(stop.set)
        thread.join()


async def _serve(faults: Faults, server: str, tls: ssl.SSLContext, ready: threading.Event, stop: asyncio.Event) -> None:
    faults._loop = asyncio.get_running_loop()
    handler = _Proxy(faults, server, tls)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", handler.handle)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=True, read_bufsize=1 << 22) as session:
        handler.session = session
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "proxy", "user": {"token": "replaced-by-the-proxy"}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
        }
        faults.kubeconfig.write_text(yaml.safe_dump(content))
        ready.set()
        await stop.wait()
        await runner.cleanup()
