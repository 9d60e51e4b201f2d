# SPDX-License-Identifier: Apache-2.0
"""What the handlers share, and how a client leaves. Thread: the loop's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from kvpool.config import AuthConfig, ServerConfig
from kvpool.engine.engine import Engine
from kvpool.metrics.catalogue import series_key
from kvpool.metrics.numbers import Numbers
from kvpool.model.errors import IdentityRefused
from kvpool.server.answers import Answers
from kvpool.server.calls import Client
from kvpool.server.connections import Connections
from kvpool.server.identity import Authenticator
from kvpool.server.lanes import Lanes
from kvpool.server.rings import Rings

__all__ = ["Parts"]

log = structlog.get_logger()

Cause = Literal["died", "silent", "replaced", "identity", "unread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The pieces that compose puts together once."""

    config: ServerConfig
    authenticator: Authenticator
    engine: Engine
    connections: Connections
    answers: Answers
    lanes: Lanes
    numbers: Numbers
    rings: Rings
    clock: Callable[[], float]
    """Monotonic seconds."""

    def admit_again(self, auth: AuthConfig) -> None:
        """Judge everybody anew by the namespaces and tenants of *auth*: who is somebody else by now has to say Hello.

        Whoever is not admitted any more hears why at that Hello.
        """
        self.authenticator.follow(auth)
        for client in self.connections:
            if not self._is_who_it_was(client):
                self.lose(client, "identity")

    def _is_who_it_was(self, client: Client) -> bool:
        try:
            return self.authenticator.tenant_of(client.namespace) == client.tenant
        except IdentityRefused:
            return False

    def lose(self, client: Client, cause: Cause, *, proven_dead: bool = False) -> None:
        """Let go of a client that left without a word: its leases end, what it may still write to stays held."""
        self.release(client)
        self.engine.client_lost(client.client_id, self.clock(), proven_dead=proven_dead)
        self.numbers.add(series_key("kvpool_dropped_clients_total", cause=cause))
        log.info("client.lost", client=client.client_id.hex(), label=client.label, tenant=client.tenant, cause=cause)

    def release(self, client: Client) -> None:
        """Forget a client's connections and its waiting requests; what it holds in the engine is not touched."""
        self.rings.end(client.client_id, "the client left")
        self.connections.drop(client)
        self.answers.abandon(client)
        self.lanes.leave(client.lane)
