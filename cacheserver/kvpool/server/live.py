# SPDX-License-Identifier: Apache-2.0
"""What of the configuration changes while the server runs: the size of L1, its watermarks, the list of living pools.

Everything else counts from the next start on; the status says what waits for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import structlog

from kvpool.arena.errors import ArenaError
from kvpool.arena.leftovers import Living
from kvpool.config import ConfigError, ServerConfig, leaf_fields
from kvpool.engine.room import Room
from kvpool.server.source import ConfigFile

__all__ = ["LiveArena", "LiveConfig", "LiveState"]

log = structlog.get_logger()

_LIVE: Final = frozenset({"l1.size_bytes", "l1.evict_above", "l1.evict_to", "l1.quotas", "living_pools", "written_for"})


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


class LiveConfig:
    """Follows the file. Thread: the loop's.

    Args:
        config: what the server runs with.
        source: where it is from.
        arena: what has room or not.
        room: what is resized.
        clock: monotonic seconds.
    """

    def __init__(
        self, config: ServerConfig, source: ConfigFile, arena: LiveArena, room: Room, clock: Callable[[], float]
    ) -> None:
        self._started = self._applied = config
        self._source, self._arena, self._room, self._clock = source, arena, room, clock
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
        restart = _differing(self._started, config) - _LIVE
        refused = self._resize(config)
        above, to = config.l1.evict_above, config.l1.evict_to
        self._room.set_watermarks(above, to)
        self._room.set_quotas(config.l1.quotas)
        if config.living_pools is not None and config.living_pools != self._applied.living_pools:
            swept = self._arena.sweep(Living(config.living_pools, self._source.written_at))
            log.info("pools.swept", pools=swept)
        self._applied = config
        self.state = LiveState(refused, config.l1.size_bytes, tuple(sorted(restart)))
        log.info("config.followed", l1_bytes=config.l1.size_bytes, refused=refused, restart=self.state.restart)

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
        self._room.resize(regions, self._clock())
        arena.grow()
        if too_large:
            return f"l1.size_bytes: {size_bytes} is more than this server can have without a restart ({most_bytes})"
        return ""


def _differing(one: ServerConfig, other: ServerConfig) -> set[str]:
    paths = [path for path, _ in leaf_fields(ServerConfig).values()]
    return {".".join(p) for p in paths if _at(one, p) != _at(other, p)}


def _at(config: ServerConfig, path: tuple[str, ...]) -> Any:
    found: Any = config
    for name in path:
        found = getattr(found, name)
    return found
