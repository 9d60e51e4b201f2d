# SPDX-License-Identifier: Apache-2.0
"""ShmArena: the arena on shared memory files. ``opening.open_arena`` makes it."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.arena import header
from kvpool.arena.files import Folder
from kvpool.arena.growth import Growth
from kvpool.arena.header import Pick, SlotState, Store
from kvpool.arena.leftovers import Fate, Living, aside_bytes, sweep_other_pools
from kvpool.arena.page import Cut
from kvpool.arena.preflight import Machine, check_memory
from kvpool.arena.scopes import Scopes
from kvpool.arena.segment import Segment
from kvpool.arena.sizes import Sizes
from kvpool.config import L1Config
from kvpool.model.slots import RecoveredRegion, SlotArray, header_rows

__all__ = ["Parts", "ShmArena"]

_GROWTH_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Parts:
    """What an arena is made of, opened and checked."""

    folder: Folder
    pool_uid: str
    sizes: Sizes
    segments: Sequence[Segment]
    """All regions, in order."""

    scopes: Scopes
    swept_pools: Sequence[str]
    config: L1Config
    machine: Machine


class ShmArena:
    """Implements the engine's ``Arena`` port; made by ``opening.open_arena``. Use as a context manager, or ``close``.

    The thread that owns the engine calls everything, but ``descriptor`` and ``growth_failure``, which any thread may.
    Slot numbers and positions are the engine's own: they are not checked beyond what NumPy does.
    """

    def __init__(
        self, parts: Parts, recovered: Sequence[RecoveredRegion], sequence: int, resources: contextlib.ExitStack
    ) -> None:
        self.regions = parts.sizes.regions
        self.usable = parts.sizes.usable
        self.region_bytes = parts.sizes.region_bytes
        self.stride = parts.sizes.stride
        self.recovered = recovered
        self.swept_pools = parts.swept_pools
        """Uids of deleted pools whose files were removed when this arena was opened."""

        self._folder, self._pool_uid = parts.folder, parts.pool_uid
        self._config, self._machine = parts.config, parts.machine
        self._segments, self._scopes = parts.segments, parts.scopes
        self._sequence = sequence
        self._growth: Growth | None = None
        self._resources = resources

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop growing, unmap, let go of the pool's lock; without ``persist`` the files go, too. Idempotent.

        Views and descriptors that others still have stay valid.
        """
        self._resources.close()

    def format(self, region: int, slot_bytes: int, owner: str) -> int:
        """Cut an empty region into slots; returns how many. Erases all its headers first.

        A region that gets another owner gets new memory, see ``generation``. One that the background has not reserved
        yet is reserved here: 0.11 s/GiB.

        Raises:
            LayoutRefused: such slots do not fit into a region.
            PoolFull: the tmpfs is full; the region stays empty.
        """
        slots = self.region_bytes // slot_bytes if slot_bytes > 0 else 0
        self._segments[region].format(Cut(slot_bytes, slots, owner))
        return slots

    def retire(self, region: int) -> None:
        """Give a region's memory back: nothing in it is found any more, and nobody's mapping reaches what comes after.

        What clients have mapped stays taken until they let go.
        """
        self._segments[region].retire()

    def restore(self, region: int) -> None:
        """Let a retired region be cut again."""
        self._segments[region].restore()

    def check_room(self, regions: int) -> None:
        """Refuse more regions in use than the machine has room for.

        Raises:
            ArenaError: with the numbers and the remedy.
        """
        config = msgspec.structs.replace(self._config, size_bytes=regions * self.region_bytes)
        sizes = Sizes(self.regions, self.region_bytes, regions)
        taken = sum(s.taken_bytes() for s in self._segments)
        check_memory(config, sizes, taken, self._machine)

    def release(self, region: int) -> None:
        """Make a region empty, with new memory: nobody's mapping reaches it any more, and nothing in it is found."""
        self._segments[region].release()

    def begin(self, slots: SlotArray, rows: NDArray[np.void]) -> None:
        """Mark *slots* as being written and put *rows* into their headers."""
        self._apply(slots, header.rewriting(rows, SlotState.WRITING, self._next(len(slots))))

    def commit(
        self, slots: SlotArray, lengths: NDArray[np.uint64], checksums: NDArray[np.void], kinds: NDArray[np.uint8]
    ) -> None:
        """Mark *slots* as complete; a server that starts after a crash will serve them."""
        rows = self.rows(slots)
        rows["length"] = lengths
        rows["checksum"] = checksums
        rows["checksum_kind"] = kinds
        self._apply(slots, header.rewriting(rows, SlotState.READY, self._next(len(slots))))

    def erase(self, slots: SlotArray) -> None:
        """Make the headers of *slots* empty."""
        self._apply(slots, header.erasing(len(slots)))

    def rows(self, slots: SlotArray) -> NDArray[np.void]:
        """Return a copy of the header rows of *slots*."""
        parts = [(pick, header.read_rows(s.headers, positions)) for s, pick, positions in self._by_segment(slots)]
        if len(parts) == 1:
            return parts[0][1]
        rows = header_rows(len(slots))
        for pick, part in parts:
            rows[pick] = part
        return rows

    def view(self, slot: int) -> memoryview:
        """Return the writable bytes of one slot, all of them."""
        region, position = divmod(slot, self.stride)
        return self._segments[region].view(position)

    def read(self, slot: int, offset: int, length: int) -> bytes:
        """Return a copy of part of a slot, shorter if a client that may write to it has cut the file. Any thread."""
        region, position = divmod(slot, self.stride)
        return self._segments[region].read(position, offset, length)

    def offsets(self, slots: SlotArray) -> NDArray[np.uint64]:
        """Return where *slots* begin, each in its own region."""
        regions, positions = np.divmod(slots, self.stride)
        sizes = np.array([s.cut.slot_bytes if s.cut else 0 for s in self._segments], dtype=np.int64)
        offsets: NDArray[np.uint64] = (positions * sizes[regions]).astype(np.uint64)
        return offsets

    def memories(self, regions: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the numbers of the memory behind regions; a region whose memory is replaced gets a new one."""
        generations = np.array([s.generation for s in self._segments], dtype=np.int64)
        return (regions + generations[regions] * self.regions).astype(np.uint32)

    def region_of(self, memory: int) -> int:
        """Return the region that *memory* is behind; -1 if it is behind none any more."""
        generation, region = divmod(memory, self.regions)
        return region if self._segments[region].generation == generation else -1

    def descriptor(self, region: int, *, writable: bool) -> int:
        """Open a region's bytes anew for one client; the caller passes the descriptor on and closes it. Any thread.

        A writable one carries the shared lock that ``writers_gone`` looks for, until the last copy of the descriptor
        and the last mapping made from it are gone, in whatever process they are.

        Raises:
            Busy: a client holds the region's lock exclusively.
            OSError: out of descriptors.
        """
        return self._segments[region].descriptor(writable=writable)

    def writers_gone(self, region: int) -> bool:
        """Return True if it is proven that no process but this one can write to the region."""
        return self._segments[region].writers_gone()

    def remember_scope(self, scope: bytes, tenant: str, model: str, namespace: bytes) -> None:
        """Keep the names behind a scope digest, so that they are known after a restart.

        Raises:
            OSError: the folder is full; known until the end of this process all the same.
        """
        self._scopes.remember(scope, tenant, model, namespace)

    def remembered_scopes(self) -> dict[bytes, tuple[str, str, bytes]]:
        """Return all (tenant, model, namespace) kept by ``remember_scope``."""
        return self._scopes.known()

    def grow(self, threads: int = 0) -> None:
        """Begin to take the memory of all regions in use, in the background; again after regions were restored.

        0 threads means half of the cores, at most four.
        """
        if self._growth is None:
            self._resources.callback(self._stop_growing)
        self._stop_growing()
        wanted = threads or min(_GROWTH_THREADS, max(1, (os.cpu_count() or 1) // 2))
        self._growth = Growth(self._segments, wanted)

    def _stop_growing(self) -> None:
        if self._growth is not None:
            self._growth.stop()

    @property
    def grown_bytes(self) -> int:
        """Bytes whose memory is reserved."""
        return sum(s.grown_bytes for s in self._segments)

    @property
    def growth_failure(self) -> str:
        """Why growing in the background ended early; empty if it did not. Any thread."""
        return self._growth.failure if self._growth else ""

    def wait_grown(self, timeout_s: float) -> bool:
        """Wait for the background to be done; False if it is not within *timeout_s* (a thread)."""
        return self._growth is None or self._growth.join(timeout_s)

    def sweep(self, living: Living) -> list[str]:
        """Remove what deleted pools left; returns their uids."""
        fates = sweep_other_pools(self._folder, replace(living, pools={*living.pools, self._pool_uid}))
        return [pool for pool, fate in fates.items() if fate is Fate.REMOVED]

    def aside_bytes(self) -> int:
        """Bytes of former segments of another size or version that some client still holds; removes the others."""
        return aside_bytes(self._folder, self._pool_uid)

    def _apply(self, slots: SlotArray, steps: list[Store]) -> None:
        for segment, pick, positions in self._by_segment(slots):
            header.apply(segment.headers, positions, [step.taken(pick) for step in steps])

    def _by_segment(self, slots: SlotArray) -> Iterator[tuple[Segment, Pick, SlotArray]]:
        """Yield (segment, which of *slots*, their positions in it)."""
        regions, positions = np.divmod(slots, self.stride)
        numbers = set(regions.tolist())
        for number in numbers:
            pick: Pick = slice(None) if len(numbers) == 1 else np.flatnonzero(regions == number)
            yield self._segments[number], pick, positions[pick]

    def _next(self, count: int) -> int:
        """Return the first of *count* new sequence numbers."""
        first = self._sequence
        self._sequence += count
        return first
