# SPDX-License-Identifier: Apache-2.0
"""One region: its data file, its header file and the server's mappings of both.

Memory is reserved with posix_fallocate before anybody maps it, so a full tmpfs is an error that names numbers and never
a SIGBUS in the middle of a copy. Reserving costs 0.11 s/GiB (pages are taken, not cleared); clearing them happens at
first touch, 0.74 s/GiB at best, and the background does that before the first store where it can.

A region that gets another owner gets a new data file, too: mappings that clients of the former owner still have go on
showing the old memory, which nobody uses any more, and can neither read nor change the new owner's chunks.
"""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvpool.arena.errors import ArenaError
from kvpool.arena.files import LAYOUT_VERSION, Folder
from kvpool.arena.header import HEADER_BYTES, HEADER_WORDS, Words
from kvpool.arena.page import OWNER_BYTES, Cut, Page, identity_page
from kvpool.arena.sizes import LEAST_SLOT_BYTES, PAGE_BYTES, Sizes
from kvpool.model.errors import Busy, LayoutRefused, PoolFull
from kvpool.model.slots import SERVER_OWNED

__all__ = ["Segment", "file_names"]

_FULL: Final = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)


def file_names(pool_uid: str, region: int, version: int = LAYOUT_VERSION) -> tuple[str, str]:
    """Return the names of a region's data file and header file."""
    stem = f"kvpool.{pool_uid}.v{version}.{region}"
    return f"{stem}.data", f"{stem}.head"


class Segment:
    """One region of an arena. The owner's thread calls everything but ``grow`` and ``touch``, which any thread may.

    Raises:
        ArenaError: the files do not fit *sizes*, or the tmpfs is full.
    """

    def __init__(self, folder: Folder, pool_uid: str, region: int, sizes: Sizes) -> None:
        self.region = region
        self.generation = 0
        """Counts how often the memory behind this region was replaced: a mapping is good for one generation."""
        self.cut: Cut | None = None
        self.headers: Words = np.empty((0, HEADER_WORDS), dtype=np.uint64)
        self._folder, self._sizes = folder, sizes
        self._data_name, self._head_name = file_names(pool_uid, region)
        self._lock = threading.Lock()
        self._closed = False
        self._idle = False
        self._touched = 0
        self._data_fd = self._folder.open(self._data_name, writable=False)
        self._data, self._grown = self._map_data()
        self._head = self._map_head(PAGE_BYTES)
        self._page = Page(np.frombuffer(self._head, dtype=np.uint8, count=PAGE_BYTES))
        if not self._page.is_of(pool_uid, region, sizes):
            self.close()
            raise ArenaError(
                f"l1.directory: {folder.path / self._head_name} is of another pool, version or size; remove it"
            )

    @classmethod
    def create(cls, folder: Folder, pool_uid: str, region: int, sizes: Sizes) -> "Segment":
        """Make the files of an empty region (no memory is taken yet) and open it."""
        data, head = file_names(pool_uid, region)
        _create_sparse(folder, data, sizes.region_bytes)
        folder.replace(head, identity_page(pool_uid, region, sizes))
        return cls(folder, pool_uid, region, sizes)

    def adopt(self) -> bool:
        """Take over the cut that a former server left; False if the region is empty.

        Raises:
            PoolFull: part of the memory is missing and the tmpfs is full.
        """
        cut = self._page.cut()
        if cut is None or self._folder.size_bytes(self._head_name) < PAGE_BYTES + cut.slots * HEADER_BYTES:
            return False
        self.reserve()
        self._open_headers(cut.slots)
        self.cut = cut
        return True

    def format(self, cut: Cut) -> None:
        """Cut the region, which holds nothing that anybody uses.

        Raises:
            LayoutRefused: the slots do not fit.
            PoolFull: the tmpfs is full; the region stays empty and may be formatted later.
        """
        self._check(cut)
        stale = self._page.used and (self.cut is None or self.cut.owner != cut.owner)
        self._clear()
        if stale:
            self._renew_data()
        self._page.set_used(used=True)
        self.reserve()
        with self._refusing("slot headers"), self._folder.opened(self._head_name) as fd:
            os.posix_fallocate(fd, PAGE_BYTES, cut.slots * HEADER_BYTES)
        self._open_headers(cut.slots)
        self._page.write(cut)
        self.cut = cut

    def retire(self) -> None:
        """Give the region's memory back and reserve none until ``restore``; nobody uses it."""
        with self._lock:
            self._idle = True
        self._clear()
        if self._page.used or self._grown:
            self._renew_data()

    def restore(self) -> None:
        """Let the region be used again."""
        with self._lock:
            self._idle = False

    def release(self) -> None:
        """Make the region empty, with new memory: no mapping that a client still has reaches it any more."""
        self._clear()
        if self._page.used:
            self._renew_data()

    def view(self, position: int) -> memoryview:
        """Return the bytes of one slot. They stay valid after ``close``; the memory then goes with the last view."""
        if self.cut is None or not 0 <= position < self.cut.slots:
            raise IndexError(f"region {self.region} has no slot {position}")
        start = position * self.cut.slot_bytes
        return memoryview(self._data)[start : start + self.cut.slot_bytes]

    def read(self, position: int, offset: int, length: int) -> bytes:
        """Return a copy of part of a slot, shorter if a client that may write here has cut the file. Any thread.

        Reading the mapping instead would kill the process by signal in that case.
        """
        if self.cut is None or not 0 <= position < self.cut.slots:
            raise IndexError(f"region {self.region} has no slot {position}")
        return os.pread(self._data_fd, length, position * self.cut.slot_bytes + offset)

    def descriptor(self, *, writable: bool) -> int:
        """Open the data file anew for one client; see ``Folder`` for the lock of a writable one.

        Raises:
            Busy: a client holds the lock exclusively.
        """
        if not writable:
            return self._folder.open(self._data_name, writable=False)
        try:
            return self._folder.open_for_writer(self._data_name)
        except BlockingIOError as e:
            raise Busy(f"region {self.region} is locked; ask again") from e

    def writers_gone(self) -> bool:
        """Return True if no client's writable descriptor or mapping of this region's memory is left."""
        return self._folder.writers_gone(self._data_name)

    def reserve(self) -> None:
        """Reserve all memory of the region, as far as the background has not yet.

        Raises:
            PoolFull: the tmpfs is full.
        """
        while self.grow(self._sizes.region_bytes):
            pass

    def grow(self, length: int) -> int:
        """Reserve up to *length* more bytes; returns how many. Any thread.

        Raises:
            PoolFull: the tmpfs is full.
        """
        with self._lock:
            rest = self._sizes.region_bytes - self._grown
            length = 0 if self._closed or self._idle else min(length, rest)
            if length:
                with self._refusing("memory"), self._folder.opened(self._data_name) as fd:
                    os.posix_fallocate(fd, self._grown, length)
                self._grown += length
            return length

    def touch(self, length: int) -> int:
        """Make the kernel clear and map up to *length* more reserved bytes; returns how many. Any thread.

        It only reads, so it does no harm to a chunk that is being written. Regions of tenants are left alone: a client
        that truncates its segment would kill whoever reads it by signal.
        """
        with self._lock:
            ours = not self._closed and (self.cut is None or self.cut.owner == SERVER_OWNED)
            length = min(length, self._grown - self._touched) if ours else 0
            if length:
                pages = np.frombuffer(self._data, dtype=np.uint8, count=length, offset=self._touched)
                np.max(pages[::PAGE_BYTES])
                self._touched += length
            return length

    def taken_bytes(self) -> int:
        """Bytes of memory that the region's files take."""
        return sum(self._folder.allocated_bytes(name) for name in (self._data_name, self._head_name))

    @property
    def grown_bytes(self) -> int:
        """Bytes of the region whose memory is reserved."""
        return self._grown

    def close(self) -> None:
        """Unmap everything; idempotent. The files stay."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.headers = self.headers[:0].copy()
            self._page = Page(np.zeros(PAGE_BYTES, dtype=np.uint8))
            for mapping in (self._head, self._data):
                _unmap(mapping)
            os.close(self._data_fd)

    def _check(self, cut: Cut) -> None:
        limit = self._sizes.region_bytes
        if not LEAST_SLOT_BYTES <= cut.slot_bytes <= limit:
            raise LayoutRefused(
                f"a slot of {cut.slot_bytes} bytes does not fit: segments here allow {LEAST_SLOT_BYTES} to {limit}; "
                "raise l1.segment_bytes (or l1.size_bytes) of the server"
            )
        if len(cut.owner.encode()) > OWNER_BYTES:
            raise LayoutRefused(
                f"the tenant's name has {len(cut.owner.encode())} bytes; at most {OWNER_BYTES} can be kept"
            )

    def _clear(self) -> None:
        """Empty the region; its headers go with the mark, then with their memory."""
        self._page.erase()
        self.cut = None
        self.headers = self.headers[:0].copy()
        with self._folder.opened(self._head_name) as fd:
            os.ftruncate(fd, PAGE_BYTES)

    def _renew_data(self) -> None:
        """Put a new data file in the place of the old one, whose memory goes when its last mapping does."""
        with self._lock:
            temporary = f"{self._data_name}.tmp"
            self._folder.remove(temporary)
            _create_sparse(self._folder, temporary, self._sizes.region_bytes)
            self._folder.rename(temporary, self._data_name)
            _unmap(self._data)
            os.close(self._data_fd)
            self._data_fd = self._folder.open(self._data_name, writable=False)
            self._data, self._grown = self._map_data()
            self._touched = 0
            self.generation += 1
            self._page.set_used(used=False)

    def _map_data(self) -> tuple[mmap.mmap, int]:
        """Map the data file; with how much of it is reserved, which is all or taken for nothing."""
        with self._folder.opened(self._data_name) as fd:
            info = os.fstat(fd)
            if info.st_size != self._sizes.region_bytes:
                raise ArenaError(f"l1.directory: {self._folder.path / self._data_name} has the wrong size; remove it")
            grown = info.st_size if info.st_blocks * 512 >= info.st_size else 0
            return mmap.mmap(fd, info.st_size), grown

    def _map_head(self, length: int) -> mmap.mmap:
        with self._folder.opened(self._head_name) as fd:
            return mmap.mmap(fd, length)

    def _open_headers(self, slots: int) -> None:
        """Map the headers, in place of the page alone."""
        head = self._map_head(PAGE_BYTES + slots * HEADER_BYTES)
        self._page = Page(np.frombuffer(head, dtype=np.uint8, count=PAGE_BYTES))
        _unmap(self._head)
        self._head = head
        words = np.frombuffer(head, dtype=np.uint64, count=slots * HEADER_WORDS, offset=PAGE_BYTES)
        self.headers = words.reshape(slots, HEADER_WORDS)

    def _refusing(self, what: str) -> "contextlib.AbstractContextManager[None]":
        return _full_is_refused(f"no room for the {what} of region {self.region} in {self._folder.path}")


@contextlib.contextmanager
def _full_is_refused(text: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in _FULL:
            raise PoolFull(f"{text}: {e.strerror}") from e
        raise


def _create_sparse(folder: Folder, name: str, length: int) -> None:
    fd = folder.create(name)
    try:
        os.ftruncate(fd, length)
    finally:
        os.close(fd)


def _unmap(mapping: mmap.mmap) -> None:
    """Close a mapping, or leave that to its last view."""
    with contextlib.suppress(BufferError):
        mapping.close()
