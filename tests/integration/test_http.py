# SPDX-License-Identifier: Apache-2.0
import http.client
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvpool.model.errors import DeadlineExceeded, InvalidRange
from kvpool.server.faces import METRICS_TYPE
from kvpool.server.http import AdminFace, ClearOrder, HttpServer, OperationsFace, serve_admin, serve_operations


@dataclass
class Server:
    """What stands behind the faces in these tests: values that a test sets."""

    live: bool = True
    ready: bool = True
    crash: Exception | None = None
    orders: list[ClearOrder] = field(default_factory=list)

    def status(self) -> dict[str, int]:
        if self.crash:
            raise self.crash
        return {"chunks": 7}

    def clear(self, order: ClearOrder) -> dict[str, int]:
        if self.crash:
            raise self.crash
        self.orders.append(order)
        return {"chunks": 3, "kept": 1}

    def operations(self) -> OperationsFace:
        return OperationsFace(
            live=lambda: self.live,
            ready=lambda: self.ready,
            metrics=lambda: b"kvpool_chunks 7.0\n",
            metrics_type=METRICS_TYPE,
            status=self.status,
        )

    def admin(self) -> AdminFace:
        return AdminFace(
            clients=lambda: [{"label": "pod-a", "held_bytes": 5}],
            movers=lambda: [{"gpu": "GPU-1"}],
            chunks=lambda: [{"tenant": "t", "model": "m", "chunks": 7}],
            clear=self.clear,
        )


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=5)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(5)
        self.sock.connect(str(self._path))


@pytest.fixture
def behind() -> Server:
    return Server()


@pytest.fixture
def operations(behind: Server) -> Iterator[HttpServer]:
    server = serve_operations(behind.operations(), "127.0.0.1", 0, time.monotonic)
    yield server
    server.close()


@pytest.fixture
def admin_path(behind: Server, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "admin.sock"
    server = serve_admin(behind.admin(), str(path), time.monotonic)
    yield path
    server.close()


def ask(to: HttpServer | Path, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes, dict[str, str]]:
    connection = (
        UnixConnection(to) if isinstance(to, Path) else http.client.HTTPConnection(*to.server_address, timeout=5)
    )
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def raw(to: HttpServer, data: bytes) -> bytes:
    with socket.create_connection(to.server_address, timeout=5) as s:
        answer = b""
        try:
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            while part := s.recv(65536):
                answer += part
        except OSError:
            pass  # it closed before it had read everything
        return answer


@pytest.mark.behaviour("R059")
def test_the_operations_face_shows_live_ready_metrics_and_status(operations: HttpServer) -> None:
    assert ask(operations, "GET", "/live")[:2] == (200, b"live\n")
    assert ask(operations, "GET", "/ready")[:2] == (200, b"ready\n")
    assert ask(operations, "GET", "/metrics")[:2] == (200, b"kvpool_chunks 7.0\n")
    assert ask(operations, "GET", "/metrics")[2]["Content-Type"] == METRICS_TYPE
    assert json.loads(ask(operations, "GET", "/status?x=1")[1]) == {"chunks": 7}


def test_a_loop_that_does_not_answer_is_503(operations: HttpServer, behind: Server) -> None:
    behind.live, behind.ready = False, False

    assert ask(operations, "GET", "/live")[0] == 503
    assert ask(operations, "GET", "/ready")[0] == 503


@pytest.mark.behaviour("D113")
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/env",
        "/config",
        "/loglevel",
        "/clear",
        "/clients",
        "/../etc/passwd",
        "//etc/passwd",
        "/live/",
        "/%2e%2e/live",
    ],
)
def test_nothing_else_is_there(operations: HttpServer, path: str) -> None:
    status, body, _ = ask(operations, "GET", path)

    assert (status, body) == (404, b"no such page\n")


@pytest.mark.behaviour("D113")
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_the_operations_face_only_answers_get(operations: HttpServer, method: str) -> None:
    status, _, headers = ask(operations, method, "/status")

    assert status == 405
    assert headers["Allow"] == "GET"


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /live HTTP/1.0\r\nx: " + b"a" * 70000 + b"\r\n\r\n", 431),
        (b"GET /live HTTP/1.0\r\n" + b"x: y\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"a" * 70000 + b" HTTP/1.0\r\n\r\n", 414),
        (b"BREW /live HTTP/1.0\r\n\r\n", 501),
        (b"\x00\xff\x00\r\n\r\n", 400),
        (b"GET /live HTTP/9.9\r\n\r\n", 505),
    ],
    ids=["long header", "many headers", "long path", "unknown method", "no http", "other version"],
)
def test_a_hostile_request_gets_a_clean_refusal_and_the_next_one_is_served(
    operations: HttpServer, request_text: bytes, status: int
) -> None:
    answer = raw(operations, request_text)

    assert str(status).encode() in answer.split(b"\n")[0]
    assert b"Traceback" not in answer
    assert ask(operations, "GET", "/live")[0] == 200


def test_a_crash_behind_a_page_is_a_500_without_details(operations: HttpServer, behind: Server) -> None:
    behind.crash = RuntimeError("inner workings")

    status, body, _ = ask(operations, "GET", "/status")

    assert (status, body) == (500, b"see the server log\n")
    assert ask(operations, "GET", "/live")[0] == 200


def test_a_silent_connection_is_cut_when_its_time_is_up(behind: Server) -> None:
    now = [0.0]
    server = serve_operations(behind.operations(), "127.0.0.1", 0, lambda: now[0])
    try:
        with socket.create_connection(server.server_address, timeout=5) as s:
            s.sendall(b"GET /live HT")
            assert ask(server, "GET", "/live")[0] == 200  # accepted after the first one
            now[0] = 60.0
            assert s.recv(100) == b""  # long before the 5 s of this socket
    finally:
        server.close()


def test_more_connections_than_threads_are_closed_and_later_ones_served(behind: Server) -> None:
    gate, entered = threading.Event(), threading.Semaphore(0)

    def slow() -> bool:
        entered.release()
        return gate.wait(10)

    face = OperationsFace(live=slow, ready=lambda: True, metrics=lambda: b"", metrics_type=METRICS_TYPE, status=dict)
    server = serve_operations(face, "127.0.0.1", 0, time.monotonic)
    try:
        waiting = [threading.Thread(target=ask, args=(server, "GET", "/live")) for _ in range(8)]
        for thread in waiting:
            thread.start()
        for _ in waiting:
            assert entered.acquire(timeout=5)
        assert raw(server, b"GET /ready HTTP/1.0\r\n\r\n") == b""
        gate.set()
        for thread in waiting:
            thread.join(5)
        assert ask(server, "GET", "/ready")[0] == 200
    finally:
        gate.set()
        server.close()


@pytest.mark.behaviour("R059")
def test_the_admin_face_names_clients_and_counts_chunks(admin_path: Path) -> None:
    assert json.loads(ask(admin_path, "GET", "/clients")[1]) == [{"label": "pod-a", "held_bytes": 5}]
    assert json.loads(ask(admin_path, "GET", "/chunks")[1]) == [{"tenant": "t", "model": "m", "chunks": 7}]


def test_the_admin_socket_is_for_its_owner_alone(admin_path: Path) -> None:
    assert stat.S_IMODE(admin_path.stat().st_mode) == 0o600


def test_clear_passes_the_order_on(admin_path: Path, behind: Server) -> None:
    status, body, _ = ask(admin_path, "POST", "/clear", b'{"tenant": "t", "model": "m", "forced": true}')

    assert (status, json.loads(body)) == (200, {"chunks": 3, "kept": 1})
    assert behind.orders == [ClearOrder(tenant="t", model="m", forced=True)]


def test_clear_without_a_body_is_for_everything_unforced(admin_path: Path, behind: Server) -> None:
    ask(admin_path, "POST", "/clear", b"")

    assert behind.orders == [ClearOrder(tenant="", model="", forced=False)]


@pytest.mark.parametrize("body", [b"nonsense", b'{"tenants": "t"}', b'{"forced": "yes"}', b"[]", b"\xff"])
def test_a_wrong_order_is_refused_and_nothing_is_cleared(admin_path: Path, behind: Server, body: bytes) -> None:
    assert ask(admin_path, "POST", "/clear", body)[0] == 400
    assert behind.orders == []


def test_clear_by_get_is_refused(admin_path: Path, behind: Server) -> None:
    status, _, headers = ask(admin_path, "GET", "/clear")

    assert (status, headers["Allow"]) == (405, "POST")
    assert behind.orders == []


def test_a_body_over_the_limit_is_refused(admin_path: Path, behind: Server) -> None:
    assert ask(admin_path, "POST", "/clear", b" " * 70000)[0] == 413
    assert behind.orders == []


@pytest.mark.parametrize(
    ("error", "status"), [(DeadlineExceeded("the loop is busy"), 504), (InvalidRange("no such model"), 409)]
)
def test_a_refusal_of_the_loop_is_told(admin_path: Path, behind: Server, error: Exception, status: int) -> None:
    behind.crash = error

    answer = ask(admin_path, "POST", "/clear", b"{}")

    assert answer[:2] == (status, f"{error}\n".encode())


def test_a_left_over_socket_is_replaced_and_a_living_one_is_not(behind: Server, tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_over:
        left_over.bind(str(path))
    server = serve_admin(behind.admin(), str(path), time.monotonic)
    try:
        with pytest.raises(FileExistsError, match="another server listens"):
            serve_admin(behind.admin(), str(path), time.monotonic)
        assert ask(path, "GET", "/clients")[0] == 200
    finally:
        server.close()
    assert not path.exists()


def test_another_file_of_that_name_is_never_removed(behind: Server, tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    path.write_text("precious")

    with pytest.raises(FileExistsError, match="no socket"):
        serve_admin(behind.admin(), str(path), time.monotonic)

    assert path.read_text() == "precious"


def test_close_is_idempotent_and_leaves_no_thread(behind: Server) -> None:
    before = set(threading.enumerate())
    server = serve_operations(behind.operations(), "127.0.0.1", 0, time.monotonic)
    assert ask(server, "GET", "/live")[0] == 200

    server.close()
    server.close()

    assert set(threading.enumerate()) == before
