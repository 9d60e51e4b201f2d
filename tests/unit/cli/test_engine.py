# SPDX-License-Identifier: Apache-2.0
"""What `kvpool status --engine` makes of an engine's metrics page."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvpool.cli.engine import metrics_of, view_of
from kvpool.cli.errors import Failure, UsageError
from kvpool.cli.main import main
from kvpool.connector.statistics import COUNTERS, GAUGES, SERVER, UNCACHED, UP

LABELS = ("model_name", "engine")
ENGINE = ("tiny", "0")


def page(*, down: str = "", uncached: str = "") -> bytes:
    """A page as an engine with the connector's table shows it, among metrics of others."""
    registry = CollectorRegistry()
    Counter("vllm:prompt_tokens", "", LABELS, registry=registry).labels(*ENGINE).inc(5)
    for number, row in enumerate(COUNTERS.values()):
        Counter(f"vllm:{row.name}", row.help, LABELS, registry=registry).labels(*ENGINE).inc(number + 1)
    for row in GAUGES.values():
        Gauge(f"vllm:{row.name}", row.help, LABELS, registry=registry).labels(*ENGINE).set(0)
    servers = Gauge(f"vllm:{SERVER.name}", SERVER.help, (*LABELS, "server", "state"), registry=registry)
    servers.labels(*ENGINE, "tcp://10.0.0.1:9600", UP).set(1)
    servers.labels(*ENGINE, "tcp://10.0.0.2:9600", UP).set(not down)
    if down:
        servers.labels(*ENGINE, "tcp://10.0.0.2:9600", down).set(1)
    halves = Gauge(f"vllm:{UNCACHED.name}", UNCACHED.help, (*LABELS, "half", "reason"), registry=registry)
    halves.labels(*ENGINE, "worker", "unreachable").set(0)
    if uncached:
        halves.labels(*ENGINE, "scheduler", uncached).set(1)
    return generate_latest(registry)


@contextmanager
def serving(body: bytes, status: int = 200) -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_servers_and_halves_are_shown_as_they_stand_now() -> None:
    with serving(page(down="deadline", uncached="refused")) as url:
        view = view_of(metrics_of(url))

    assert view.servers == (
        {"engine": "0", "server": "tcp://10.0.0.1:9600", "state": "up"},
        {"engine": "0", "server": "tcp://10.0.0.2:9600", "state": "deadline"},
    )
    assert view.uncached == ({"engine": "0", "half": "scheduler", "reason": "refused"},)
    assert list(view.numbers) == [*COUNTERS, *GAUGES]
    assert [view.numbers[key] for key in COUNTERS] == list(range(1, len(COUNTERS) + 1))
    assert view.hit_rate == view.numbers["hit_tokens"] / view.numbers["lookup_tokens"]


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_a_person_reads_the_table(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(page(down="deadline")) as url:
        assert main(["status", "--engine", url + path]) == 0

    shown = capsys.readouterr().out
    assert "cache     in use" in shown
    assert shown.splitlines()[-1].split() == ["0", "tcp://10.0.0.2:9600", "deadline"]


def test_a_program_reads_json(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(page(uncached="refused")) as url:
        assert main(["status", "--engine", url, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert [s["state"] for s in found["servers"]] == ["up", "up"]
    assert found["uncached"][0]["reason"] == "refused"
    assert found["hit_rate"] == found["numbers"]["hit_tokens"] / found["numbers"]["lookup_tokens"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [(b"vllm:prompt_tokens_total 5.0\n", 200, "no metrics of kvpool"), (b"", 503, "503")],
)
def test_what_is_no_engine_with_kvpool_is_refused_in_words(body: bytes, status: int, says: str) -> None:
    with serving(body, status) as url, pytest.raises(Failure, match=says):
        metrics_of(url)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "file:///etc/passwd"])
def test_only_http_is_asked(url: str) -> None:
    with pytest.raises(UsageError, match="HTTP address"):
        metrics_of(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://", "http://" + "[", "http://host:port"])
def test_an_engine_that_is_not_there_is_named(url: str) -> None:
    with pytest.raises(Failure, match="engine http"):
        metrics_of(url)


def test_an_engine_is_asked_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--engine", "http://localhost:8000", "--admin", "/run/kvpool/admin.sock"]) == 2

    assert "--engine" in capsys.readouterr().err
