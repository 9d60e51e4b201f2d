# SPDX-License-Identifier: Apache-2.0
"""Arenas, rows and machines for the tests of the arena."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpool.arena.opening import open_arena
from kvpool.arena.preflight import Machine
from kvpool.arena.shm import ShmArena
from kvpool.config import L1Config
from kvpool.model.slots import HEADER_ROW, header_rows

MIB = 1 << 20
KIB = 1 << 10
BODY_FIELDS = [n for n in HEADER_ROW.names or () if n not in ("length", "checksum", "checksum_kind")]


def small_config(path: Path, **changes: object) -> L1Config:
    """Sixteen MiB in four regions, in any folder."""
    fields: dict[str, object] = {"size_bytes": 16 * MIB, "directory": str(path / "arena"), "allow_disk": True}
    return L1Config(**(fields | changes))  # type: ignore[arg-type]


def small_arena(path: Path, pool_uid: str = "pool", **changes: object) -> ShmArena:
    return open_arena(small_config(path, **changes), pool_uid)


def machine(
    texts: Mapping[str, str] | None = None, free_bytes: int = 1 << 50, user: int = 0, files: int = 1 << 20
) -> Machine:
    """A machine that says what the test wants; without texts one with no limits."""
    return Machine((texts or {}).get, lambda _: free_bytes, user, lambda _: files)


def rows_of(*numbers: int) -> NDArray[np.void]:
    """Header rows in which every byte and field tells the number, so that a mixture of two shows."""
    rows = header_rows(len(numbers))
    for name in HEADER_ROW.names or ():
        field = HEADER_ROW[name]
        for i, number in enumerate(numbers):
            raw = (number % 200 + 1).to_bytes(1, "little") * field.itemsize
            rows[name][i] = np.frombuffer(raw, dtype=field)[0]
    return rows


def slots_of(arena: ShmArena, region: int, *positions: int) -> NDArray[np.int64]:
    return np.array(positions, dtype=np.int64) + region * arena.stride


def store(arena: ShmArena, slots: NDArray[np.int64], *numbers: int) -> NDArray[np.void]:
    """Begin and commit *slots*; returns the rows that their headers have then."""
    rows = rows_of(*numbers)
    arena.begin(slots, rows)
    arena.commit(slots, rows["length"], rows["checksum"], rows["checksum_kind"])
    return rows
