# SPDX-License-Identifier: Apache-2.0
"""Questions to a server's admin face: HTTP over a private Unix socket."""

import http.client
import socket
from typing import Any, Final

import msgspec

from kvpool.cli.errors import Failure

__all__ = ["clients_of", "movers_of"]

DEADLINE_S: Final = 5.0


class _UnixConnection(http.client.HTTPConnection):
    """HTTP to the socket at *path*."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the path instead of a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(self._path)


def clients_of(path: str) -> list[dict[str, Any]]:
    """Return what the server knows of each of its clients.

    Raises:
        Failure: there is no admin face at *path*, or it did not answer; the text says what to do.
    """
    return _list_of(path, "/clients")


def movers_of(path: str) -> list[dict[str, Any]]:
    """Return how the bytes of each worker move, and its mover; raises as ``clients_of``."""
    return _list_of(path, "/movers")


def _list_of(path: str, page: str) -> list[dict[str, Any]]:
    connection = _UnixConnection(path)
    try:
        connection.request("GET", page)
        answer = connection.getresponse()
        body = answer.read()
    except OSError as e:
        why = e.strerror or str(e)
        raise Failure(f"--admin {path}: {why}; name the server's http.admin_socket, as the server's user") from e
    except http.client.HTTPException as e:
        raise Failure(f"--admin {path}: no HTTP answer ({e!r}); name the server's http.admin_socket") from e
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise Failure(f"--admin {path}: {answer.status} {body.decode(errors='replace').strip()}")
    return _decode(path, body)


def _decode(path: str, body: bytes) -> list[dict[str, Any]]:
    try:
        clients: list[dict[str, Any]] = msgspec.json.decode(body, type=list[dict[str, Any]])
    except msgspec.MsgspecError as e:
        raise Failure(f"--admin {path}: no list ({e}); is it the admin face of a kvpool server?") from e
    return clients
