# SPDX-License-Identifier: Apache-2.0
"""Maps arena regions into this process, each once, and lets them go with their session."""

import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Final, Protocol

import numpy as np

from kvpool.client.pages import populate
from kvpool.client.ports import PageLocks
from kvpool.client.supervise import attempt
from kvpool.model.errors import InvalidRange, ServerUnavailable

__all__ = ["Fetch", "Segments"]


class Fetch(Protocol):
    """Where descriptors come from: ``Descriptors.fetch``."""

    def __call__(self, memory: int, *, writable: bool) -> tuple[int, int]:
        """Return a fresh descriptor of the region and its length."""


_STEP_BYTES: Final = 16 << 20
"""Pages that come at a time: nothing else of the process is mapped meanwhile, and nobody waits for the whole region."""


class Segments:
    """The mapped regions of one session. Any thread.

    A region is mapped read-only until something is to be written to it. Nothing is unmapped by hand: a mapping goes
    when neither this object nor a copy has a view of it, and its descriptor (whose lock tells the server that a writer
    may live) goes with it. So do the locks of its pages, if copy engines move the blocks.
    """

    def __init__(self, fetch: Fetch, locks: PageLocks | None = None) -> None:
        self._fetch = fetch
        self._locker = _Locker(locks) if locks is not None else None
        self._lock = threading.Lock()
        self._readable: dict[int, _Mapping] = {}
        self._writable: dict[int, _Mapping] = {}

    def reading(self, memory: int, offset: int, length: int) -> memoryview:
        """Return a read-only view of part of a region.

        Raises:
            CacheError: the region cannot be mapped, or the part lies outside of it.
        """
        with self._lock:
            whole = self._readable.get(memory)
            if whole is None:
                # Not the writable mapping, if there is one: what reads must not be able to write.
                whole = self._readable[memory] = self._map(memory, writable=False)
        return _part(whole, memory, offset, length, writable=False)

    def writing(self, memory: int, offset: int, length: int) -> memoryview:
        """Return a writable view of part of a region.

        Raises:
            CacheError: the region cannot be mapped, or the part lies outside of it.
        """
        with self._lock:
            whole = self._writable.get(memory)
            if whole is None:
                whole = self._writable[memory] = self._map(memory, writable=True)
        return _part(whole, memory, offset, length, writable=True)

    def drop(self) -> None:
        """Forget all mappings; those under a running copy last until it ends. Idempotent."""
        with self._lock:
            self._readable = {}
            self._writable = {}
        if self._locker is not None:
            self._locker.stop()

    def __len__(self) -> int:
        return len(self._readable) + len(self._writable)

    def _map(self, memory: int, *, writable: bool) -> "_Mapping":
        descriptor, length = self._fetch(memory, writable=writable)
        try:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapped = _Mapping(descriptor, length, flags=mmap.MAP_SHARED, prot=access)
        except (OSError, ValueError) as e:
            raise ServerUnavailable(f"memory {memory} cannot be mapped: {e}") from e
        finally:
            os.close(descriptor)
        # A forked child must not keep a way to write to slots that this process has given back.
        mapped.madvise(mmap.MADV_DONTFORK)
        if self._locker is not None:
            self._locker.add(mapped, writable=writable)
        return mapped


class _Mapping(mmap.mmap):
    """Takes the locks of its pages back before it is unmapped, whoever had the last view of it."""

    unlock: Callable[[], None] | None = None
    """Set once its pages are locked."""

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


class _Locker:
    """Locks the pages of regions, one after the other; meanwhile they can be used as if there were no locks.

    A thread of its own: the pages of a region that nobody used yet take 0.74 s/GiB to come, and a prompt's chunks may
    lie in all regions.
    """

    def __init__(self, locks: PageLocks) -> None:
        self._locks = locks
        self._due: SimpleQueue[tuple[_Mapping, bool] | None] = SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def add(self, mapping: _Mapping, *, writable: bool) -> None:
        """Lock a region soon. Not two calls at a time."""
        self._due.put((mapping, writable))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvpool-locks", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Lock nothing more; afterwards this object has no view of a region. Waits for one step. Idempotent."""
        self._stopping = True
        self._due.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        for mapping, writable in iter(self._due.get, None):
            if not self._stopping:
                attempt("locking mapped memory", partial(self._lock, mapping, writable=writable))

    def _lock(self, mapping: _Mapping, *, writable: bool) -> None:
        whole = np.frombuffer(mapping, dtype=np.uint8)
        address, length = whole.ctypes.data, whole.size
        for at in range(0, length, _STEP_BYTES):
            if self._stopping:
                return
            populate(address + at, min(_STEP_BYTES, length - at), writable=writable)
        if self._locks.lock(address, length, writable=writable):
            mapping.unlock = partial(self._locks.unlock, address)


def _part(whole: _Mapping, memory: int, offset: int, length: int, *, writable: bool) -> memoryview:
    if offset + length > len(whole):
        raise InvalidRange(f"bytes {offset} to {offset + length} of memory {memory}, which has {len(whole)}")
    part = memoryview(whole)[offset : offset + length]
    if length and whole.unlock is None:
        populate(np.frombuffer(part, dtype=np.uint8).ctypes.data, length, writable=writable)
    return part
