# SPDX-License-Identifier: Apache-2.0
"""What of the configuration changes while the server runs, and how.

The size of L1, its watermarks and quotas; which namespaces are admitted, and as which tenants; the log's level; the
list of living pools. Everything else counts from the next start on; the status says what waits for it.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from kvpool.arena.errors import ArenaError
from kvpool.arena.leftovers import Living
from kvpool.config import AuthConfig, ConfigError, ServerConfig, live_digest, restart_fields
from kvpool.server.logs import set_level
from kvpool.server.parts import Parts
from kvpool.server.source import ConfigFile

__all__ = ["LiveArena", "LiveConfig", "LiveState"]

log = structlog.get_logger()


class LiveArena(Protocol):
    """The part of the arena that is needed here; see ``kvpool.arena.shm.ShmArena``."""

    regions: int
    region_bytes: int

    def check_room(self, regions: int) -> None:
        """Raise ArenaError if the machine has no room for so many regions."""

    def grow(self) -> None:
        """Take the memory of all regions in use, in the background."""

    def sweep(self, living: Living) -> list[str]:
        """Remove what deleted pools left; returns their uids."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """How the running server stands to its file."""

    refused: str = ""
    """Why a part of the file is not followed; empty if nothing is refused."""

    asked_bytes: int = 0
    """Size of L1 that the file asks for, as last read; 0 if it was not read again."""

    restart: tuple[str, ...] = ()
    """Fields that have another value in the file than here, and count from the next start on."""

    digest: str = ""
    """Name of the settings that are followed, as last read; empty if they were not read again."""


class LiveConfig:
    """Follows the file. Thread: the loop's.

    Args:
        config: what the server runs with.
        source: where it is from.
        arena: what has room or not.
        parts: what is changed.
    """

    def __init__(self, config: ServerConfig, source: ConfigFile, arena: LiveArena, parts: Parts) -> None:
        self._started = self._applied = config
        self._source, self._arena, self._parts = source, arena, parts
        self.state = LiveState()

    def turn(self) -> None:
        """Read the file again, since something in its folder changed."""
        try:
            config = self._source.changed()
        except ConfigError as e:
            log.warning("config.refused", error=str(e))
            self.state = replace(self.state, refused=str(e))
            return
        if config is not None:
            self._follow(config)

    def _follow(self, config: ServerConfig) -> None:
        restart = tuple(restart_fields(self._started, config))
        refused = self._resize(config)
        room = self._parts.engine.room
        room.set_watermarks(config.l1.evict_above, config.l1.evict_to)
        room.set_quotas(config.l1.quotas)
        self._admit(config.auth)
        set_level(config.log)
        self._parts.answers.follow_log()
        if config.living_pools is not None and config.living_pools != self._applied.living_pools:
            swept = self._arena.sweep(Living(config.living_pools, self._source.written_at))
            log.info("pools.swept", pools=swept)
        self._applied = config
        self.state = LiveState(refused, config.l1.size_bytes, restart, live_digest(config))
        log.info("config.followed", l1_bytes=config.l1.size_bytes, refused=refused, restart=self.state.restart)

    def _admit(self, auth: AuthConfig) -> None:
        """Names mean something by the way in which they are proven: a file for another one waits for the next start."""
        if auth.kind is self._started.auth.kind:
            self._parts.admit_again(auth)

    def _resize(self, config: ServerConfig) -> str:
        """Use as many regions as the file says; returns why not."""
        arena, size_bytes = self._arena, config.l1.size_bytes
        regions = max(1, min(size_bytes // arena.region_bytes, arena.regions))
        most_bytes = arena.regions * arena.region_bytes
        too_large = size_bytes - most_bytes >= arena.region_bytes
        try:
            arena.check_room(regions)
        except ArenaError as e:
            log.warning("l1.not_resized", error=str(e))
            return str(e)
        self._parts.engine.room.resize(regions, self._parts.clock())
        arena.grow()
        if too_large:
            return f"l1.size_bytes: {size_bytes} is more than this server can have without a restart ({most_bytes})"
        return ""
