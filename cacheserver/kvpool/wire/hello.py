# SPDX-License-Identifier: Apache-2.0
"""How a connection begins and keeps its identity."""

from typing import Annotated

from msgspec import Meta, Struct

from kvpool.model.identity import ClientKind, Role
from kvpool.wire.basics import Digest, Id128, Reply, Request

__all__ = ["AttachBulk", "Attached", "Hello", "Limits", "Renew", "Renewed", "Welcome"]


class Limits(Struct, frozen=True, kw_only=True):
    """What the server takes from one client."""

    frame_bytes: int
    chunks: int
    in_flight: int
    bulk_window: int
    """Bulk frames of full size that may be under way."""

    bulk_frames: int = 0
    """Smaller ones may be more, up to this number and no more bytes than the window has; 0: they may not."""


class Welcome(Reply, frozen=True, kw_only=True, tag="welcome"):
    """Answer to Hello."""

    version: int
    server_id: str
    server_version: str
    chunk_tokens: int
    tenant: str
    """Taken from the client's identity, never from its word."""

    limits: Limits
    heartbeat_s: float
    lookup_lease_s: float
    store_lease_s: float
    ticket: Id128
    """Binds the bulk connection and the descriptor socket to this client."""

    descriptor_socket: str = ""
    """Path of the Unix socket that hands out segments; empty if the client came over TCP."""

    identity_expires_s: float | None = None
    """Seconds until the credential must be renewed."""

    plain_bulk_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """TCP port of the same host for a bulk connection without encryption; 0 if there is none."""

    features: tuple[str, ...] = ()


class Hello(Request[Welcome], frozen=True, kw_only=True, tag="hello"):
    """First message of a control connection; again after a reply with another boot id."""

    version_min: int
    version_max: int
    kind: ClientKind
    client_id: Id128
    self_test: Digest
    role: Role = Role.BOTH
    client_version: str = ""
    label: Annotated[str, Meta(max_length=253)] = ""
    credential: Annotated[str, Meta(max_length=16384)] = ""
    """A service-account token or the shared secret; never logged."""

    features: tuple[str, ...] = ()


class Attached(Reply, frozen=True, kw_only=True, tag="attached"):
    """Answer to AttachBulk."""


class AttachBulk(Request[Attached], frozen=True, kw_only=True, tag="attach_bulk"):
    """First message of a bulk connection: binds it to the client whose Hello was given *ticket*."""

    ticket: Id128


class Renewed(Reply, frozen=True, kw_only=True, tag="renewed"):
    """Answer to Renew."""

    identity_expires_s: float | None


class Renew(Request[Renewed], frozen=True, kw_only=True, tag="renew"):
    """Replaces the credential before it expires; it must be of the same tenant."""

    credential: Annotated[str, Meta(max_length=16384)]
