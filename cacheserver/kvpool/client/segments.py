# SPDX-License-Identifier: Apache-2.0
"""Maps arena regions into this process, each once, and lets them go with their session."""

import mmap
import os
import threading
from typing import Protocol

import numpy as np

from kvpool.client.pages import populate
from kvpool.model.errors import InvalidRange, ServerUnavailable

__all__ = ["Fetch", "Segments"]


class Fetch(Protocol):
    """Where descriptors come from: ``Descriptors.fetch``."""

    def __call__(self, memory: int, *, writable: bool) -> tuple[int, int]:
        """Return a fresh descriptor of the region and its length."""


class Segments:
    """The mapped regions of one session. Any thread.

    A region is mapped read-only until something is to be written to it. Nothing is unmapped by hand: a mapping goes
    when neither this object nor a copy has a view of it, and its descriptor (whose lock tells the server that a writer
    may live) goes with it.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._readable: dict[int, memoryview] = {}
        self._writable: dict[int, memoryview] = {}

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

    def __len__(self) -> int:
        return len(self._readable) + len(self._writable)

    def _map(self, memory: int, *, writable: bool) -> memoryview:
        descriptor, length = self._fetch(memory, writable=writable)
        try:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapped = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED, prot=access)
        except (OSError, ValueError) as e:
            raise ServerUnavailable(f"memory {memory} cannot be mapped: {e}") from e
        finally:
            os.close(descriptor)
        # A forked child must not keep a way to write to slots that this process has given back.
        mapped.madvise(mmap.MADV_DONTFORK)
        return memoryview(mapped)


def _part(whole: memoryview, memory: int, offset: int, length: int, *, writable: bool) -> memoryview:
    if offset + length > len(whole):
        raise InvalidRange(f"bytes {offset} to {offset + length} of memory {memory}, which has {len(whole)}")
    part = whole[offset : offset + length]
    if length:
        populate(np.frombuffer(part, dtype=np.uint8).ctypes.data, length, writable=writable)
    return part
