# SPDX-License-Identifier: Apache-2.0
"""Every implementation of the engine's ``Arena`` port, real and fake: the contract suite runs over all of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.fakes.arena import MemoryArena
from tests.fakes.arenas_on_disk import MIB, small_config

from kvpool.arena.opening import open_arena
from kvpool.engine.ports import Arena

Factory = Callable[[Path], AbstractContextManager[Arena]]
"""Opens an arena over a folder: what one process leaves there, the next one over the same folder finds.

At least three regions of at least 4 MiB each.
"""


@contextmanager
def shm_arena(folder: Path) -> Iterator[Arena]:
    with open_arena(small_config(folder), "contract") as arena:
        yield arena


@contextmanager
def shm_arena_growing(folder: Path) -> Iterator[Arena]:
    """With its memory being reserved and cleared in the background at the same time."""
    with open_arena(small_config(folder, size_bytes=24 * MIB), "contract") as arena:
        arena.grow(threads=2)
        yield arena


_LEFT: dict[Path, MemoryArena] = {}
"""What the last memory arena over a folder left there."""


@contextmanager
def memory_arena(folder: Path) -> Iterator[Arena]:
    arena = _LEFT[folder].reopen() if folder in _LEFT else MemoryArena(4, 4 * MIB)
    yield arena
    _LEFT[folder] = arena


ARENAS: dict[str, Factory] = {"memory": memory_arena, "shm": shm_arena, "shm growing": shm_arena_growing}
