# SPDX-License-Identifier: Apache-2.0
"""The statistics of all cache servers from one loopback address: fake nodes run no containers that could answer.

``python -m tests.cluster.servers PORT`` answers for thousands of them, always the same, from a process of its own.
"""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiohttp import web

__all__ = ["Statistics", "statistics"]


class Statistics:
    """What every server says, as the operations face of a real one says it; tests change it while it is served."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.clients = 0
        self.series: dict[str, float] = {}
        self.used_bytes = 0
        self.more: dict[str, Any] = {}
        """Further fields, and others than the usual ones."""

    def of(self, ip: str) -> dict[str, Any]:
        """The answer for the pod at *ip*."""
        self.asked.append(ip)
        return {
            "server_id": ip,
            "server_version": "0.1.0",
            "boot_id": ip.encode().hex(),
            "l1_bytes": 1 << 30,
            "l1_used_bytes": self.used_bytes,
            "clients": self.clients,
            "series": dict(self.series),
            **self.more,
        }


@contextmanager
def statistics() -> Iterator[Statistics]:
    """Serve `Statistics` on loopback; its ``url`` takes the place of the servers' addresses."""
    numbers = Statistics()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(numbers.of(self.path.strip("/"))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # an operator that was killed does not listen any more
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    numbers.url = f"http://127.0.0.1:{server.server_address[1]}/{{ip}}"
    try:
        yield numbers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main(port: int) -> None:
    """Answer until a signal."""
    numbers = Statistics()

    async def answer(request: web.Request) -> web.Response:
        numbers.asked.clear()
        return web.json_response(numbers.of(request.match_info["ip"]))

    app = web.Application()
    app.router.add_get("/{ip}", answer)
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=lambda *_: None)


if __name__ == "__main__":
    main(int(sys.argv[1]))
