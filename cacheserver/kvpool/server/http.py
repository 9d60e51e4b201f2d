# SPDX-License-Identifier: Apache-2.0
"""The two HTTP faces of a server.

*Operations* listens on the pod's address and only answers GET: live, ready, metrics, status. It never names a client.
*Admin* listens on a Unix socket of mode 0600: clients with the bytes each one holds, chunk counts, clear.

Nothing here knows the engine. ``compose`` passes callables in: what needs the request loop posts a question to it
(``request_loop``) and waits with a deadline, everything else reads the published ``ServerSnapshot``.

Thread: every request runs on one of a few threads of the face's own. A connection has one request and one deadline;
when all threads are taken, a further connection is closed at once.
"""

import os
import socket
import socketserver
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import BoundedSemaphore, Lock, Thread
from typing import Annotated, Any, Final, Self
from urllib.parse import urlsplit

import msgspec
import structlog
from msgspec import Meta, Struct

from kvpool._version import __version__
from kvpool.model.errors import CacheError, DeadlineExceeded, Refused

__all__ = [
    "AdminFace",
    "Answer",
    "ClearOrder",
    "Face",
    "HttpServer",
    "OperationsFace",
    "serve_admin",
    "serve_operations",
]

_THREADS: Final = 8
_CONNECTION_S: Final = 10.0
_BODY_BYTES: Final = 64 << 10
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"

log = structlog.get_logger()


class ClearOrder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /clear: what to drop. Both names empty means everything."""

    tenant: Annotated[str, Meta(max_length=128)] = ""
    model: Annotated[str, Meta(max_length=512)] = ""
    forced: bool = False
    """Drop chunks that are held, too: their loads will fail."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a route returns."""

    body: bytes
    content_type: str = _TEXT
    status: HTTPStatus = HTTPStatus.OK

    @classmethod
    def json(cls, value: Any) -> Self:
        """Return *value* as JSON."""
        return cls(msgspec.json.encode(value) + b"\n", _JSON)

    @classmethod
    def text(cls, text: str, status: HTTPStatus = HTTPStatus.OK) -> Self:
        """Return one line of text."""
        return cls(f"{text}\n".encode(), _TEXT, status)


Route = Callable[[bytes], Answer]
"""Takes the request's body."""

Routes = Mapping[str, Mapping[str, Route]]
"""Path to method to route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationsFace:
    """What the operations face shows. Thread: each callable is called by several HTTP threads at once."""

    live: Callable[[], bool]
    """Ask the request loop and wait for its answer, at most ``http.live_s``; False if none came."""

    ready: Callable[[], bool]
    metrics: Callable[[], bytes]
    """Exposition text (``kvpool.metrics.exporter``)."""

    metrics_type: str
    status: Callable[[], Any]
    """Numbers without any client's name; encoded as JSON."""

    def routes(self) -> Routes:
        """Return what is served."""
        return {
            "/live": {"GET": lambda _: _verdict(self.live(), "live")},
            "/ready": {"GET": lambda _: _verdict(self.ready(), "ready")},
            "/metrics": {"GET": lambda _: Answer(self.metrics(), self.metrics_type)},
            "/status": {"GET": lambda _: Answer.json(self.status())},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminFace:
    """What the admin face shows and does. Thread: as for the operations face.

    Each callable asks the request loop; DeadlineExceeded becomes 504, another refusal 409.
    """

    clients: Callable[[], Any]
    """All clients with the bytes each one holds; encoded as JSON."""

    movers: Callable[[], Any]
    """Each worker's way of moving bytes, and its mover; encoded as JSON."""

    chunks: Callable[[], Any]
    """Chunk counts by tenant and model; encoded as JSON."""

    clear: Callable[[ClearOrder], Any]
    """Do it and say how many chunks went and how many stayed; encoded as JSON."""

    def routes(self) -> Routes:
        """Return what is served."""
        return {
            "/clients": {"GET": lambda _: Answer.json(self.clients())},
            "/movers": {"GET": lambda _: Answer.json(self.movers())},
            "/chunks": {"GET": lambda _: Answer.json(self.chunks())},
            "/clear": {
                "POST": lambda body: Answer.json(self.clear(msgspec.json.decode(body or b"{}", type=ClearOrder)))
            },
        }


Face = OperationsFace | AdminFace


def _verdict(good: bool, word: str) -> Answer:
    return Answer.text(word) if good else Answer.text(f"not {word}", HTTPStatus.SERVICE_UNAVAILABLE)


class _Handler(BaseHTTPRequestHandler):
    """One request of one connection, then the end: HTTP/1.0."""

    server: "HttpServer"
    server_version = f"kvpool/{__version__}"
    sys_version = ""
    timeout = _CONNECTION_S
    error_content_type = _TEXT
    error_message_format = "%(code)d %(message)s\n"

    def _serve(self) -> None:
        answer, allowed = self._answer()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        if allowed:
            self.send_header("Allow", allowed)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    # Every method that HTTP knows; which ones a path takes is the routes' business.
    do_GET = do_POST = do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _serve  # noqa: N815

    def _answer(self) -> tuple[Answer, str]:
        """Return the answer and, for a wrong method, the right ones."""
        methods = self.server.routes.get(urlsplit(self.path).path)
        if methods is None:
            return Answer.text("no such page", HTTPStatus.NOT_FOUND), ""
        route = methods.get(self.command)
        if route is None:
            return Answer.text("wrong method", HTTPStatus.METHOD_NOT_ALLOWED), ", ".join(methods)
        return self._run(route), ""

    def _run(self, route: Route) -> Answer:
        try:
            return route(self._body())
        except (_Refusal, msgspec.MsgspecError, UnicodeDecodeError) as e:
            status = e.status if isinstance(e, _Refusal) else HTTPStatus.BAD_REQUEST
            return Answer.text(str(e), status)
        except CacheError as e:
            return Answer.text(str(e), _status_of(e))
        except Exception:
            log.exception("http.crashed", path=self.path)
            return Answer.text("see the server log", HTTPStatus.INTERNAL_SERVER_ERROR)

    def _body(self) -> bytes:
        if self.command != "POST":
            return b""
        length = self.headers.get("Content-Length")
        if length is None:
            raise _Refusal("Content-Length is missing", HTTPStatus.LENGTH_REQUIRED)
        if not (length.isascii() and length.isdigit()):
            raise _Refusal("Content-Length is no number", HTTPStatus.BAD_REQUEST)
        if len(length) > len(str(_BODY_BYTES)) or int(length) > _BODY_BYTES:
            raise _Refusal(f"at most {_BODY_BYTES} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return self.rfile.read(int(length))

    def address_string(self) -> str:
        """Return nothing of the peer: a Unix socket has no address, and a look-up of a name could hang."""
        return ""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class names it so)
        """Write the base class's complaints (bad request lines, timeouts) at debug."""
        log.debug("http.noted", text=format % args)


class _Refusal(Exception):
    def __init__(self, text: str, status: HTTPStatus) -> None:
        super().__init__(text)
        self.status = status


def _status_of(error: CacheError) -> HTTPStatus:
    if isinstance(error, DeadlineExceeded):
        return HTTPStatus.GATEWAY_TIMEOUT
    return HTTPStatus.CONFLICT if isinstance(error, Refused) else HTTPStatus.SERVICE_UNAVAILABLE


class HttpServer(socketserver.TCPServer):
    """Serves one face until ``close``. Thread: any, for ``start`` and ``close``; both are idempotent."""

    allow_reuse_address = True
    request_queue_size = 32

    def __init__(self, address: Any, routes: Routes, clock: Callable[[], float], family: int = socket.AF_INET) -> None:
        self.address_family = family
        self.routes = routes
        self._clock = clock
        self._free = BoundedSemaphore(_THREADS)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="http")
        self._deadlines: dict[socket.socket, float] = {}
        self._lock = Lock()
        self._path: Path | None = None
        self._thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="http-accept", daemon=True)
        super().__init__(address, _Handler)

    def start(self) -> Self:
        """Begin to accept connections."""
        if not self._thread.is_alive():
            self._thread.start()
        return self

    def close(self) -> None:
        """Stop accepting, cut what is under way, and wait for the threads."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self._cut(float("inf"))
        self._pool.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind; a Unix socket gets its mode before it listens, so nobody else can ever connect."""
        if self.address_family == socket.AF_UNIX:
            path = Path(str(self.server_address))
            _remove_stale(path)
            self.socket.bind(str(path))
            self._path = path
            path.chmod(0o600)
        else:
            if self.address_family == socket.AF_INET6:
                # On [::] the other family's peers are welcome, whatever the machine's default is.
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            super().server_bind()

    def server_close(self) -> None:
        """Close the socket and remove its name, if it was this server that made it."""
        super().server_close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hand a connection to a free thread; close it if there is none."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._deadlines[request] = self._clock() + _CONNECTION_S
        self._pool.submit(self._work, request, client_address)

    def _work(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as e:
            # The peer went away, or its time was up.
            log.debug("http.cut", error=str(e))
        finally:
            with self._lock:
                self._deadlines.pop(request, None)
            self.shutdown_request(request)
            self._free.release()

    def service_actions(self) -> None:
        """Cut connections whose time is up: a peer that sends one byte a second holds no thread for long."""
        self._cut(self._clock())

    def _cut(self, now_s: float) -> None:
        with self._lock:
            for request in [r for r, deadline_s in self._deadlines.items() if deadline_s <= now_s]:
                # Shut down, not closed: the thread that reads from it closes it.
                _shut(request)
                del self._deadlines[request]


def _shut(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer was faster


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on.

    Raises:
        OSError: something else has this name, or a living server listens there.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} exists and is no socket; remove it or name another http.admin_socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise FileExistsError(f"{path}: another server listens there; stop it or name another http.admin_socket")


def serve_operations(face: OperationsFace, host: str, port: int, clock: Callable[[], float]) -> HttpServer:
    """Start the operations face; port 0 takes a free one (``server_address`` says which).

    Args:
        face: what to show.
        host: address to listen on.
        port: TCP port.
        clock: monotonic seconds, for the deadlines of connections.

    Raises:
        OSError: the address cannot be taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return HttpServer((host, port), face.routes(), clock, family).start()


def serve_admin(face: AdminFace, path: str, clock: Callable[[], float]) -> HttpServer:
    """Start the admin face on a Unix socket of mode 0600.

    Raises:
        OSError: the path cannot be taken; the text says why.
    """
    return HttpServer(path, face.routes(), clock, socket.AF_UNIX).start()
