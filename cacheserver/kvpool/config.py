# SPDX-License-Identifier: Apache-2.0
"""ServerConfig and ClientConfig, declared once; the operator renders them, server and client read them.

A value comes from the JSON file, and a variable of the environment overrides it: the variable's name is the prefix and
the field's path (``l1.size_bytes`` is ``KVPOOL_SERVER__L1__SIZE_BYTES``; two underscores, because Kubernetes puts
``KVPOOL_SERVER_PORT`` and the like into every pod beside a Service of that name). In the environment byte sizes may have
a suffix (``8GiB``, ``512Mi``); nothing further in knows that a size was ever text.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from kvpool._version import __version__
from kvpool.model.identity import Mode, Role

__all__ = [
    "CLIENT_ENV_PREFIX",
    "SERVER_ENV_PREFIX",
    "AuthConfig",
    "AuthKind",
    "ClientConfig",
    "ConfigError",
    "HttpConfig",
    "Issuer",
    "L1Config",
    "LeaseConfig",
    "LimitConfig",
    "ListenConfig",
    "LogConfig",
    "ServerConfig",
    "decode_client",
    "decode_server",
    "parse_bytes",
    "render",
]

SERVER_ENV_PREFIX: Final = "KVPOOL_SERVER__"
CLIENT_ENV_PREFIX: Final = "KVPOOL_CLIENT__"

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
SOCKET_PATH_BYTES: Final = 100
"""A Unix socket's path holds 107 bytes; the descriptor socket adds a suffix."""


class ConfigError(ValueError):
    """A configured value is wrong; the text names the field and the remedy."""


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all sections: unknown fields are refused, defaults are not rendered."""


class AuthKind(StrEnum):
    """How a client proves who it is."""

    NONE = "none"
    SECRET = "secret"
    TOKEN = "token"


class Issuer(_Section, frozen=True, kw_only=True):
    """One issuer of tokens that the server trusts."""

    issuer: Annotated[str, Meta(min_length=1, description="The token's `iss` claim.")]
    keys_file: Annotated[str, Meta(min_length=1, description="JSON Web Key Set with the issuer's public keys.")]


class AuthConfig(_Section, frozen=True, kw_only=True):
    """Identity at Hello."""

    kind: Annotated[AuthKind, Meta(description="none (private Unix socket alone), secret (shared secret file) or token.")] = (
        AuthKind.NONE
    )
    secret_file: Annotated[str, Meta(description="File with the shared secret; needed when kind is secret.")] = ""
    issuers: Annotated[tuple[Issuer, ...], Meta(description="Trusted issuers; needed when kind is token.")] = ()
    audience: Annotated[str, Meta(description="Audience that tokens must name; needed when kind is token.")] = ""
    tenant: Annotated[
        str, Meta(min_length=1, max_length=128, description="Tenant of clients without a token, or whose token has no namespace.")
    ] = "default"
    tenants: Annotated[
        dict[str, str], Meta(description="Namespace to tenant, where a namespace is not its own tenant.")
    ] = {}
    namespaces: Annotated[
        tuple[str, ...], Meta(description="Namespaces whose pods are admitted; empty admits all.")
    ] = ()
    leeway_s: Annotated[float, Meta(ge=0, le=300, description="Clock difference allowed when a token is checked.")] = 30.0


class ListenConfig(_Section, frozen=True, kw_only=True):
    """Where clients connect."""

    socket_path: Annotated[
        str, Meta(description="Unix socket for clients of this node; empty listens on none. A second one with the suffix .fd hands out segments.")
    ] = "/run/kvpool/kvpool.sock"
    socket_mode: Annotated[int, Meta(ge=0, le=0o777, description="Permission bits of the sockets.")] = 0o660
    tcp_host: Annotated[str, Meta(description="Address for TCP clients; empty listens on none.")] = ""
    tcp_port: Annotated[int, Meta(ge=0, le=65535, description="TCP port, CURVE-encrypted; 0 takes a free one.")] = 7410
    plain_bulk_port: Annotated[
        int, Meta(ge=-1, le=65535, description="TCP port for bulk connections without encryption; -1 for none, 0 takes a free one.")
    ] = -1
    curve_key_file: Annotated[
        str, Meta(description="File with the server's CURVE secret key (Z85, 40 characters); needed with tcp_host.")
    ] = ""


class L1Config(_Section, frozen=True, kw_only=True):
    """The host memory that keeps chunks."""

    size_bytes: Annotated[int, Meta(ge=16 * MIB, le=64 << 40, description="Bytes of the arena, exact.")] = 1 * GIB
    directory: Annotated[str, Meta(min_length=1, description="Folder on a tmpfs that holds the segments.")] = "/dev/shm/kvpool"  # noqa: S108
    segment_bytes: Annotated[
        int, Meta(ge=0, le=16 * GIB, description="Bytes of one segment; 0 chooses between 4 MiB and 1 GiB by size.")
    ] = 0
    allow_disk: Annotated[
        bool, Meta(description="Accept a folder that is not on a tmpfs (slow; for tests and experiments).")
    ] = False
    persist: Annotated[bool, Meta(description="Keep the segments at exit so that the next server serves them.")] = True
    evict_above: Annotated[
        float, Meta(gt=0, le=1, description="Share of slots in use above which the background evicts.")
    ] = 0.97
    evict_to: Annotated[float, Meta(gt=0, le=1, description="Share of slots in use that the background evicts down to.")] = 0.94
    policy: Annotated[Literal["lru"], Meta(description="Eviction policy.")] = "lru"
    verify_loads: Annotated[
        float, Meta(ge=0, le=1, description="Share of loads whose checksums are verified.")
    ] = 0.01


class LeaseConfig(_Section, frozen=True, kw_only=True):
    """How long claims last."""

    lookup_s: Annotated[float, Meta(gt=0, le=3600, description="A lookup's pins, unless freed before.")] = 60.0
    store_s: Annotated[float, Meta(gt=0, le=3600, description="From PrepareStore to CommitStore.")] = 60.0
    session_idle_s: Annotated[float, Meta(gt=0, le=86400, description="A request without any call is forgotten after this.")] = 600.0
    tombstone_s: Annotated[float, Meta(gt=0, le=3600, description="How long an end is remembered for calls that it overtook.")] = 60.0
    heartbeat_s: Annotated[float, Meta(gt=0, le=60, description="Interval of a client's pings.")] = 1.0
    client_silent_s: Annotated[
        float, Meta(gt=0, le=600, description="A TCP client silent for this long is taken for dead (never one with a living process handle).")
    ] = 4.0


class LimitConfig(_Section, frozen=True, kw_only=True):
    """Limits on everything; over one of them a request gets a typed refusal."""

    frame_bytes: Annotated[int, Meta(ge=64 * KIB, le=64 * MIB, description="Largest frame.")] = 4 * MIB
    chunks: Annotated[int, Meta(ge=1, le=65536, description="Chunks of one request.")] = 8192
    clients: Annotated[int, Meta(ge=1, le=65536, description="Clients at a time.")] = 1024
    in_flight: Annotated[int, Meta(ge=1, le=65536, description="Unanswered requests of one client.")] = 256
    sessions: Annotated[int, Meta(ge=1, le=1 << 20, description="Live requests, all clients together.")] = 65536
    leases: Annotated[int, Meta(ge=1, le=1 << 20, description="Live lookups and stores, all clients together.")] = 65536
    namespaces: Annotated[int, Meta(ge=1, le=65536, description="Namespaces known at a time.")] = 4096
    bulk_window: Annotated[int, Meta(ge=1, le=64, description="Bulk frames of one client under way (credits).")] = 4
    pinned_share: Annotated[float, Meta(gt=0, le=1, description="Share of L1 that lookups may pin together.")] = 0.5
    pinned_client_share: Annotated[float, Meta(gt=0, le=1, description="Share of L1 that one client's lookups may pin.")] = 0.25
    lanes: Annotated[int, Meta(ge=1, le=64, description="Threads that copy streamed bytes.")] = 2


class HttpConfig(_Section, frozen=True, kw_only=True):
    """The two HTTP faces."""

    operations_host: Annotated[str, Meta(description="Address of live, ready, metrics and status; empty for none.")] = "127.0.0.1"
    operations_port: Annotated[int, Meta(ge=0, le=65535, description="Port of the operations face; 0 takes a free one.")] = 7411
    admin_socket: Annotated[str, Meta(description="Unix socket of the admin face, mode 0600; empty for none.")] = ""
    live_s: Annotated[float, Meta(gt=0, le=60, description="The request loop must answer within this to be live.")] = 2.0


class LogConfig(_Section, frozen=True, kw_only=True):
    """Structured logs on standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least level written.")] = "info"
    format: Annotated[Literal["json", "text"], Meta(description="One JSON object a line, or text for people.")] = "json"


class ServerConfig(_Section, frozen=True, kw_only=True):
    """What a cache server needs to start; its JSON is what the operator mounts."""

    written_for: Annotated[
        str, Meta(description="Version of kvpool that wrote this file; named when a field is unknown here.")
    ] = ""
    pool_uid: Annotated[
        str, Meta(pattern="^[A-Za-z0-9-]{1,64}$", description="Uid of the pool; part of the segments' names.")
    ] = "local"
    living_pools: Annotated[
        tuple[str, ...] | None, Meta(description="Uids of all pools that exist: segments of others are swept. Not given: none is swept.")
    ] = None
    server_id: Annotated[str, Meta(max_length=253, description="Name of this server, for people; empty is the host's name.")] = ""
    chunk_tokens: Annotated[int, Meta(ge=1, le=65536, description="Tokens of one chunk.")] = 256
    drain_s: Annotated[float, Meta(gt=0, le=60, description="Time for work under way after SIGTERM.")] = 4.0
    listen: ListenConfig = ListenConfig()
    auth: AuthConfig = AuthConfig()
    l1: L1Config = L1Config()
    leases: LeaseConfig = LeaseConfig()
    limits: LimitConfig = LimitConfig()
    http: HttpConfig = HttpConfig()
    log: LogConfig = LogConfig()


class ClientConfig(_Section, frozen=True, kw_only=True):
    """What an engine needs to reach the server of its node; the connector's extra config and the environment."""

    written_for: Annotated[str, Meta(description="Version of kvpool that wrote this; named when a field is unknown here.")] = ""
    server: Annotated[
        str, Meta(pattern="^(ipc://.+|tcp://.+:[0-9]+)$", description="Address: ipc:///path or tcp://host:port.")
    ] = "ipc:///run/kvpool/kvpool.sock"
    server_key: Annotated[str, Meta(description="The server's public CURVE key (Z85); needed with tcp.")] = ""
    secret_file: Annotated[str, Meta(description="File with the shared secret.")] = ""
    token_file: Annotated[str, Meta(description="File with the pod's projected token; read again when it is renewed.")] = ""
    role: Annotated[Role, Meta(description="both, producer or consumer.")] = Role.BOTH
    modes: Annotated[
        tuple[Mode, ...], Meta(min_length=1, description="Transfer modes to offer, in order of preference.")
    ] = (Mode.CLIENT_MOVED, Mode.STREAMED)
    connect_s: Annotated[float, Meta(gt=0, le=60, description="Deadline of the handshake.")] = 2.0
    request_s: Annotated[float, Meta(gt=0, le=60, description="Deadline of a control request.")] = 2.0
    lookup_s: Annotated[float, Meta(gt=0, le=60, description="A lookup without an answer for this long is a miss.")] = 1.0
    transfer_s: Annotated[float, Meta(gt=0, le=600, description="Deadline of one store or load, whole.")] = 30.0
    store_generated: Annotated[bool, Meta(description="Store generated tokens, too.")] = False
    label: Annotated[str, Meta(max_length=253, description="Name of this client on the admin face (the pod's name).")] = ""


_SIZE: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGTP]i?)?B?\s*$", re.IGNORECASE)
_POWER: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_bytes(text: str) -> int:
    """Turn ``8GiB``, ``8Gi``, ``500M`` or a plain number into bytes.

    Raises:
        ConfigError: the text is no size.
    """
    match = _SIZE.match(text)
    if not match:
        raise ConfigError(f"{text!r} is no size in bytes; write a number, or one with a suffix such as 512MiB or 8GiB")
    unit = (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * base ** _POWER[unit.removesuffix("i")]) if "." in match[1] else (
        int(match[1]) * base ** _POWER[unit.removesuffix("i")]
    )


Config = TypeVar("Config", ServerConfig, ClientConfig)


def decode_server(data: bytes, environ: Mapping[str, str]) -> ServerConfig:
    """Read a server's configuration from JSON text, then from the environment, and check it as a whole.

    Raises:
        ConfigError: a value is wrong; the text names the field and the remedy.
    """
    config = _decode(data, environ, ServerConfig, SERVER_ENV_PREFIX)
    _check_server(config)
    return config


def decode_client(data: bytes, environ: Mapping[str, str]) -> ClientConfig:
    """Read a client's configuration from JSON text, then from the environment, and check it as a whole.

    Raises:
        ConfigError: a value is wrong; the text names the field and the remedy.
    """
    config = _decode(data, environ, ClientConfig, CLIENT_ENV_PREFIX)
    _check_client(config)
    return config


def render(config: ServerConfig | ClientConfig) -> bytes:
    """Return the JSON of *config* with only the fields that differ from their defaults."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def _decode(data: bytes, environ: Mapping[str, str], cls: type[Config], prefix: str) -> Config:
    try:
        raw = msgspec.json.decode(data or b"{}")
    except msgspec.DecodeError as e:
        raise ConfigError(f"the configuration is no valid JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ConfigError("the configuration must be a JSON object")
    fields = _paths(cls)
    for name, text in sorted(environ.items()):
        if name.startswith(prefix):
            _put(raw, fields, name, name.removeprefix(prefix).lower(), text)
    try:
        return msgspec.convert(raw, cls)
    except msgspec.ValidationError as e:
        raise ConfigError(_explain(str(e), raw)) from e


def _paths(cls: type[Struct], before: tuple[str, ...] = ()) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Map ``l1__size_bytes`` to (("l1", "size_bytes"), type) for every leaf of *cls*."""
    found: dict[str, tuple[tuple[str, ...], Any]] = {}
    for name, kind in get_type_hints(cls, include_extras=False).items():
        path = (*before, name)
        if isinstance(kind, type) and issubclass(kind, _Section):
            found |= _paths(kind, path)
        else:
            found["__".join(path)] = (path, kind)
    return found


def _put(raw: dict[str, Any], fields: dict[str, tuple[tuple[str, ...], Any]], name: str, key: str, text: str) -> None:
    if key not in fields:
        raise ConfigError(f"{name}: kvpool {__version__} has no such setting; docs/reference/configuration.md lists them all")
    path, kind = fields[key]
    target = raw
    for part in path[:-1]:
        target = target.setdefault(part, {})
    try:
        target[path[-1]] = _from_text(text, kind, path[-1])
    except (ConfigError, ValueError) as e:
        raise ConfigError(f"{name}: {e}") from e


def _from_text(text: str, kind: Any, field: str) -> Any:
    """Turn an environment variable's text into what the field's type expects."""
    if kind is int and field.endswith("_bytes"):
        return parse_bytes(text)
    if kind is int and field.endswith("_mode"):
        return int(text, 8)
    if kind in (int, float):
        return kind(text)
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{text!r} is neither true nor false")
        return text.lower() in ("true", "1")
    if _is_composite(kind):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as e:
            raise ConfigError(f"{text!r} is no valid JSON ({e}); lists and objects are written as JSON") from e
    return text


def _is_composite(kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_is_composite(k) for k in get_args(kind))
    return get_origin(kind) in (tuple, dict, list)


def _explain(message: str, raw: dict[str, Any]) -> str:
    """Name the field by its path, and for an unknown one the version that would know it."""
    message = message.replace("$.", "")
    if "unknown field" not in message:
        return f"{message}; docs/reference/configuration.md lists fields, units and ranges"
    writer = raw.get("written_for") or ""
    if writer and writer != __version__:
        return f"{message}: this is kvpool {__version__}, and the file was written for kvpool {writer}; run that version"
    return f"{message}: kvpool {__version__} has no such field; remove it (docs/reference/configuration.md lists them all)"


def _check_server(c: ServerConfig) -> None:
    listen, auth = c.listen, c.auth
    if not listen.socket_path and not listen.tcp_host:
        raise ConfigError("listen: neither socket_path nor tcp_host is set; set one, or nobody can connect")
    if len(listen.socket_path.encode()) > SOCKET_PATH_BYTES:
        raise ConfigError(
            f"listen.socket_path: {len(listen.socket_path.encode())} bytes, at most {SOCKET_PATH_BYTES} fit; use a shorter path"
        )
    if listen.tcp_host and not listen.curve_key_file:
        raise ConfigError("listen.curve_key_file: needed with listen.tcp_host; make one with `kvpool keys`")
    if listen.tcp_host and auth.kind is AuthKind.NONE:
        raise ConfigError("auth.kind: none is for a private Unix socket alone; with listen.tcp_host use secret or token")
    if auth.kind is AuthKind.SECRET and not auth.secret_file:
        raise ConfigError("auth.secret_file: needed when auth.kind is secret")
    if auth.kind is AuthKind.TOKEN and not (auth.issuers and auth.audience):
        raise ConfigError("auth.issuers and auth.audience: both needed when auth.kind is token")
    if c.l1.evict_to > c.l1.evict_above:
        raise ConfigError(f"l1.evict_to: {c.l1.evict_to} is above l1.evict_above {c.l1.evict_above}; it must be at most that")
    if c.l1.segment_bytes and (c.l1.segment_bytes % (2 * MIB) or c.l1.segment_bytes > c.l1.size_bytes):
        raise ConfigError("l1.segment_bytes: must be a multiple of 2 MiB and at most l1.size_bytes, or 0")
    if c.leases.client_silent_s < 2 * c.leases.heartbeat_s:
        raise ConfigError(
            f"leases.client_silent_s: {c.leases.client_silent_s} s is less than two heartbeats of {c.leases.heartbeat_s} s; "
            "raise it, or living clients are dropped"
        )


def _check_client(c: ClientConfig) -> None:
    if c.server.startswith("tcp://") and not c.server_key:
        raise ConfigError("server_key: needed with a tcp:// server; it is the public half of the server's CURVE key")
    if c.secret_file and c.token_file:
        raise ConfigError("secret_file and token_file: set one of them, not both")
    unknown = [m for m in c.modes if m not in (Mode.CLIENT_MOVED, Mode.STREAMED)]
    if unknown:
        raise ConfigError(f"modes: {', '.join(unknown)} not available in kvpool {__version__}; use client-moved or streamed")
