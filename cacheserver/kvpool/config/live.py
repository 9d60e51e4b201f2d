# SPDX-License-Identifier: Apache-2.0
"""Which fields of a server's configuration it follows while it runs; all others count from its next start on."""

import hashlib
from typing import Any, Final

import msgspec

from kvpool.config.fields import ServerConfig
from kvpool.config.reading import leaf_fields

__all__ = ["LIVE_FIELDS", "live_digest", "restart_fields", "without_live"]

LIVE_FIELDS: Final = frozenset(
    {
        "auth.namespaces",
        "auth.tenant",
        "auth.tenants",
        "l1.evict_above",
        "l1.evict_to",
        "l1.quotas",
        "l1.size_bytes",
        "living_pools",
        "log.level",
        "written_for",
    }
)
"""``server/live.py`` follows them; the operator replaces no pod for them."""

_TOLD_ELSEWHERE: Final = frozenset({"l1.size_bytes", "living_pools", "written_for"})
"""Followed, and no settings of the pool's users, or told by numbers of their own."""

_PATHS: Final = tuple(path for path, _ in leaf_fields(ServerConfig).values())
_DEFAULTS: Final = ServerConfig()


def restart_fields(one: ServerConfig, other: ServerConfig) -> list[str]:
    """Return the fields that differ and are not followed, sorted."""
    found = {".".join(path) for path in _PATHS if _at(one, path) != _at(other, path)}
    return sorted(found - LIVE_FIELDS)


def live_digest(config: ServerConfig) -> str:
    """Return a short name of the settings in *config* that are followed; two that differ in one have different names.

    Only the same version on both sides makes the same name of the same settings.
    """
    values = {name: _at(config, tuple(name.split("."))) for name in LIVE_FIELDS - _TOLD_ELSEWHERE}
    return hashlib.sha256(msgspec.json.encode(values, order="sorted")).hexdigest()[:16]


def without_live(config: ServerConfig) -> ServerConfig:
    """Return *config* with the default in each field that is followed: equal for two between which nothing restarts."""
    for name in LIVE_FIELDS:
        *sections, field = name.split(".")
        value = _at(_DEFAULTS, tuple(name.split(".")))
        if not sections:
            config = msgspec.structs.replace(config, **{field: value})
            continue
        (section,) = sections
        changed = msgspec.structs.replace(getattr(config, section), **{field: value})
        config = msgspec.structs.replace(config, **{section: changed})
    return config


def _at(config: ServerConfig, path: tuple[str, ...]) -> Any:
    found: Any = config
    for name in path:
        found = getattr(found, name)
    return found
