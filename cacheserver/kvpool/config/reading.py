# SPDX-License-Identifier: Apache-2.0
"""From JSON and the environment to a checked configuration, and back to JSON."""

import re
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from kvpool._version import __version__
from kvpool.config.fields import AuthKind, ClientConfig, L1Config, Section, ServerConfig

__all__ = [
    "CLIENT_ENV_PREFIX",
    "SERVER_ENV_PREFIX",
    "ConfigError",
    "decode_client",
    "decode_server",
    "leaf_fields",
    "parse_bytes",
    "render",
]

SERVER_ENV_PREFIX: Final = "KVPOOL_SERVER__"
CLIENT_ENV_PREFIX: Final = "KVPOOL_CLIENT__"

_SOCKET_PATH_BYTES: Final = 100
"""A Unix socket's path holds 107 bytes; the descriptor socket adds a suffix."""
_SEGMENT_STEP: Final = 2 << 20
_ROUNDING: Final = 1e-6
_MOST_GROWTH: Final = 16
"""Segments are at most a 32nd of the largest size, so that the smallest one still has two."""
_REFERENCE: Final = "docs/reference/configuration.md"


class ConfigError(ValueError):
    """A configured value is wrong; the text names the field and the remedy."""


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
    return (
        int(float(match[1]) * base ** _POWER[unit.removesuffix("i")])
        if "." in match[1]
        else (int(match[1]) * base ** _POWER[unit.removesuffix("i")])
    )


Config = TypeVar("Config", ServerConfig, ClientConfig)


def decode_server(data: bytes, environ: Mapping[str, str]) -> ServerConfig:
    """Read a server's configuration from JSON text, then from the environment, and check it as a whole.

    Raises:
        ConfigError: a value is wrong; the text names the field and the remedy.
    """
    config = _decode(data, environ, ServerConfig, SERVER_ENV_PREFIX)
    _check(config, _SERVER_CHECKS)
    return config


def decode_client(data: bytes, environ: Mapping[str, str]) -> ClientConfig:
    """Read a client's configuration from JSON text, then from the environment, and check it as a whole.

    Variables that this version does not know are left out if the environment was written for another one
    (``KVPOOL_CLIENT__WRITTEN_FOR``): an engine's image need not be of the operator's version.

    Raises:
        ConfigError: a value is wrong; the text names the field and the remedy.
    """
    config = _decode(data, environ, ClientConfig, CLIENT_ENV_PREFIX)
    _check(config, _CLIENT_CHECKS)
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
    fields = leaf_fields(cls)
    of_another = environ.get(f"{prefix}WRITTEN_FOR", __version__) != __version__
    for name, text in sorted(environ.items()):
        if name.startswith(prefix) and not (of_another and name.removeprefix(prefix).lower() not in fields):
            _put(raw, fields, name, name.removeprefix(prefix).lower(), text)
    try:
        return msgspec.convert(raw, cls)
    except msgspec.ValidationError as e:
        raise ConfigError(_explain(str(e), raw)) from e


def leaf_fields(cls: type[Struct], before: tuple[str, ...] = ()) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Map ``l1__size_bytes`` to (("l1", "size_bytes"), type), and so on for every field of *cls* that is no section."""
    found: dict[str, tuple[tuple[str, ...], Any]] = {}
    for name, kind in get_type_hints(cls, include_extras=False).items():
        path = (*before, name)
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= leaf_fields(kind, path)
        else:
            found["__".join(path)] = (path, kind)
    return found


def _put(raw: dict[str, Any], fields: dict[str, tuple[tuple[str, ...], Any]], name: str, key: str, text: str) -> None:
    if key not in fields:
        raise ConfigError(f"{name}: kvpool {__version__} has no such setting; {_REFERENCE} lists them all")
    path, kind = fields[key]
    target = raw
    for part in path[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{part}: {target!r} is no object; write its fields, or remove it")
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
        return f"{message}; {_REFERENCE} lists fields, units and ranges"
    writer = raw.get("written_for") or ""
    if writer and writer != __version__:
        return (
            f"{message}: this is kvpool {__version__}, and the file was written for kvpool {writer}; run that version"
        )
    return f"{message}: kvpool {__version__} has no such field; remove it ({_REFERENCE} lists them all)"


def _least_bytes(l1: L1Config) -> int:
    return min(l1.size_bytes, l1.max_bytes or l1.size_bytes)


_Check = tuple[Callable[[Any], bool], Callable[[Any], str]]

_SERVER_CHECKS: Final[tuple[_Check, ...]] = (
    (
        lambda c: bool(c.listen.socket_path or c.listen.tcp_host),
        lambda _: "listen: neither socket_path nor tcp_host is set; set one, or nobody can connect",
    ),
    (
        lambda c: len(c.listen.socket_path.encode()) <= _SOCKET_PATH_BYTES,
        lambda c: (
            f"listen.socket_path: {len(c.listen.socket_path.encode())} bytes, at most {_SOCKET_PATH_BYTES} fit; "
            "use a shorter path"
        ),
    ),
    (
        lambda c: not c.listen.tcp_host or bool(c.listen.curve_key_file),
        lambda _: "listen.curve_key_file: needed with listen.tcp_host; make one with `kvpool keys`",
    ),
    (
        lambda c: c.listen.plain_bulk_port < 0 or bool(c.listen.tcp_host),
        lambda _: "listen.plain_bulk_port: needs listen.tcp_host; set that, or -1 here",
    ),
    (
        lambda c: not c.listen.tcp_host or c.auth.kind is not AuthKind.NONE,
        lambda _: "auth.kind: none is for a private Unix socket alone; with listen.tcp_host use secret or token",
    ),
    (
        lambda c: c.auth.kind is not AuthKind.SECRET or bool(c.auth.secret_file),
        lambda _: "auth.secret_file: needed when auth.kind is secret",
    ),
    (
        lambda c: c.auth.kind is not AuthKind.TOKEN or bool(c.auth.issuers and c.auth.audience),
        lambda _: "auth.issuers and auth.audience: both needed when auth.kind is token",
    ),
    (
        lambda c: c.l1.evict_to <= c.l1.evict_above,
        lambda c: f"l1.evict_to: {c.l1.evict_to} is above l1.evict_above {c.l1.evict_above}; it must be at most that",
    ),
    (
        lambda c: c.l1.segment_bytes % _SEGMENT_STEP == 0 and c.l1.segment_bytes <= _least_bytes(c.l1),
        lambda _: "l1.segment_bytes: must be a multiple of 2 MiB and at most l1.size_bytes and l1.max_bytes, or 0",
    ),
    (
        lambda c: not c.l1.max_bytes or c.l1.max_bytes <= _MOST_GROWTH * c.l1.size_bytes,
        lambda c: (
            f"l1.max_bytes: {c.l1.max_bytes} is more than {_MOST_GROWTH} times l1.size_bytes; lower it, since segments "
            "are cut for it"
        ),
    ),
    (
        lambda c: sum(c.l1.quotas.values()) <= 1 + _ROUNDING,
        lambda c: f"l1.quotas: {sum(c.l1.quotas.values()):.3f} in sum, at most 1; lower some of them",
    ),
    (
        lambda c: c.leases.client_silent_s >= 2 * c.leases.heartbeat_s,
        lambda c: (
            f"leases.client_silent_s: {c.leases.client_silent_s} s is less than two heartbeats of "
            f"{c.leases.heartbeat_s} s; raise it, or living clients are dropped"
        ),
    ),
)

_CLIENT_CHECKS: Final[tuple[_Check, ...]] = (
    (
        lambda c: not c.server.startswith("tcp://") or bool(c.server_key or c.server_key_file),
        lambda _: "server_key: needed with a tcp:// server; it is the public half of the server's CURVE key",
    ),
    (
        lambda c: not (c.server_key and c.server_key_file),
        lambda _: "server_key and server_key_file: set one of them, not both",
    ),
    (
        lambda c: not (c.secret_file and c.token_file),
        lambda _: "secret_file and token_file: set one of them, not both",
    ),
)


def _check(config: ServerConfig | ClientConfig, checks: tuple[_Check, ...]) -> None:
    for holds, complaint in checks:
        if not holds(config):
            raise ConfigError(complaint(config))
