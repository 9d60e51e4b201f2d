# SPDX-License-Identifier: Apache-2.0
"""Connects the HTTP faces with the server: published snapshots for what only reads, questions to the loop for the rest.

Thread: everything below runs on HTTP threads, but for the questions, which the loop runs.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from kvpool.config import HttpConfig
from kvpool.model.errors import CacheError
from kvpool.model.whereabouts import bracketed
from kvpool.server.http import AdminFace, ClearOrder, HttpServer, OperationsFace, serve_admin, serve_operations
from kvpool.server.mover_table import MoverRow, mover_table
from kvpool.server.parts import Parts
from kvpool.server.paths import ListenError
from kvpool.server.snapshot import ServerSnapshot

__all__ = ["METRICS_TYPE", "Asked", "Faces", "open_faces"]

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""What prometheus_client's ``generate_latest`` writes."""

_ADMIN_S: Final = 5.0


class Asked(Protocol):
    """The part of the server that the faces need."""

    snapshot: ServerSnapshot

    @property
    def parts(self) -> Parts:
        """For questions on the loop alone."""

    def ask(self, question: Callable[[], Any], deadline_s: float) -> Any:
        """Run *question* on the loop."""


class Faces:
    """The open faces."""

    def __init__(self, operations: HttpServer | None, admin: HttpServer | None) -> None:
        self._servers = [s for s in (operations, admin) if s is not None]
        self.operations_address = ""
        if operations is not None:
            host, port = operations.server_address[:2]
            self.operations_address = f"{bracketed(str(host))}:{port}"

    def close(self) -> None:
        """Stop serving. Idempotent."""
        for server in self._servers:
            server.close()


def open_faces(config: HttpConfig, server: Asked, clock: Callable[[], float]) -> Faces:
    """Open the faces that *config* asks for.

    Raises:
        ListenError: an address cannot be taken.
    """
    operations = admin = None
    setting = "http.operations_host and http.operations_port"
    try:
        if config.operations_host:
            face = _operations(config, server, clock)
            operations = serve_operations(face, config.operations_host, config.operations_port, clock)
        setting = "http.admin_socket"
        if config.admin_socket:
            admin = serve_admin(_admin(server), config.admin_socket, clock)
    except OSError as e:
        if operations is not None:
            operations.close()
        raise ListenError(f"{setting}: {e}; free it or name another") from e
    return Faces(operations, admin)


def _operations(config: HttpConfig, server: Asked, clock: Callable[[], float]) -> OperationsFace:
    def live() -> bool:
        asked_s = clock()
        numbers = server.parts.numbers
        try:
            # The loop itself notes how long it took to get to the question.
            server.ask(lambda: numbers.put("kvpool_loop_round_trip_seconds", clock() - asked_s), config.live_s)
        except CacheError:
            return False
        return True

    return OperationsFace(
        live=live,
        ready=lambda: server.snapshot.ready,
        metrics=lambda: _exposition(server.snapshot.series),
        metrics_type=METRICS_TYPE,
        status=lambda: _status(server.snapshot),
    )


def _exposition(values: Mapping[str, float]) -> bytes:
    """Return a scrape's text. Its package is imported with the first one: a restart does not wait for it."""
    text: bytes = importlib.import_module("kvpool.metrics.exporter").exposition(values)
    return text


def _status(snapshot: ServerSnapshot) -> dict[str, Any]:
    return {f.name: getattr(snapshot, f.name) for f in dataclasses.fields(snapshot)} | {"series": dict(snapshot.series)}


def _admin(server: Asked) -> AdminFace:
    def clients() -> list[dict[str, Any]]:
        parts = server.parts
        rows: list[Any] = server.ask(lambda: parts.engine.clients(parts.clock()), _ADMIN_S)
        return [dataclasses.asdict(row) | {"client_id": row.client_id.hex()} for row in rows]

    def movers() -> list[MoverRow]:
        parts = server.parts
        rows: list[MoverRow] = server.ask(
            lambda: mover_table(parts.connections, parts.rings.numbers(parts.clock())), _ADMIN_S
        )
        return rows

    def clear(order: ClearOrder) -> dict[str, int]:
        parts = server.parts
        done = server.ask(
            lambda: parts.engine.clear(order.tenant or None, order.model, order.forced, parts.clock()), _ADMIN_S
        )
        return {"chunks": done.chunks, "kept": done.kept}

    def chunks() -> list[dict[str, Any]]:
        rows: list[Any] = server.ask(server.parts.engine.scopes, _ADMIN_S)
        return [dataclasses.asdict(row) for row in rows]

    return AdminFace(clients=clients, movers=movers, chunks=chunks, clear=clear)
