# SPDX-License-Identifier: Apache-2.0
"""Structured logs on standard error: set up once, secrets never written.

Whoever logs uses ``structlog.get_logger()`` with an event name ``noun.past_tense`` and numbers as fields with units.
"""

import logging
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, TextIO

import msgspec
import structlog

from kvpool.config import LogConfig

__all__ = ["MASK", "configure", "mask_secrets", "set_level"]

MASK: Final = "***"

_SECRET_NAME: Final = re.compile(
    r"(^|_)(credential|authorization|password|passphrase|secret|secret_key|private_key|token|ticket|jwt)s?$",
    re.IGNORECASE,
)
# Three base64url parts, the first one an encoded JSON object: a token, wherever it stands.
_TOKEN_TEXT: Final = re.compile(r"\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*")
_BEARER_TEXT: Final = re.compile(r"(?i)\b(bearer\s+)\S+")

Processor = Callable[[Any, str, MutableMapping[str, Any]], Any]


def configure(config: LogConfig, stream: TextIO) -> None:
    """Send this process's structured logs to *stream*, from the configured level on. Call once, before any thread."""
    structlog.configure(
        processors=_processors(config),
        wrapper_class=_filtering(config),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )


def set_level(config: LogConfig) -> None:
    """Write from the level of *config* on; loggers that are bound already keep the level that they have."""
    structlog.configure(wrapper_class=_filtering(config))


def _filtering(config: LogConfig) -> type[structlog.typing.FilteringBoundLogger]:
    return structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[config.level.upper()])


def mask_secrets(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace what looks like a credential, by its field's name or by its text; numbers are never touched."""
    for name in list(event):
        event[name] = _masked(name, event[name])
    return event


def _processors(config: LogConfig) -> list[Processor]:
    render: Processor
    if config.format == "json":
        render = structlog.processors.JSONRenderer(default=_plain)
    else:
        render = structlog.dev.ConsoleRenderer(colors=False)
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # Tracebacks become text first, so that the mask sees them, too.
        structlog.processors.format_exc_info,
        mask_secrets,
        render,
    ]


def _masked(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if _SECRET_NAME.search(name):
        return MASK if value else value
    if isinstance(value, str | BaseException):
        return _BEARER_TEXT.sub(rf"\1{MASK}", _TOKEN_TEXT.sub(MASK, str(value)))
    return _masked_parts(name, value)


def _masked_parts(name: str, value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        value = {field: getattr(value, field) for field in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {key: _masked(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked(name, inner) for inner in value]
    return value


def _plain(value: object) -> str:
    """Make JSON of what is none: bytes as hex, all else as text."""
    return value.hex() if isinstance(value, bytes | bytearray) else str(value)
