# SPDX-License-Identifier: Apache-2.0
"""One worker with an array for a cache: stores and loads chains through the product's own adapter, and compares."""

import os
import threading
import time
from dataclasses import dataclass
from typing import Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.cli.bench.payload import Chain, Payload
from kvpool.cli.connect import Session
from kvpool.cli.errors import Failure
from kvpool.client.jobs import LoadJob, StoreJob
from kvpool.client.worker import WorkerAdapter
from kvpool.config import ClientConfig
from kvpool.model.identity import ClientKind, GroupKind, GroupSpec, Mode, Namespace
from kvpool.wire.messages import EndRequest, Found, Lookup, Register

__all__ = ["BenchClient", "Timed", "register"]

POLL_S: Final = 0.0002
CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Timed:
    """How long one transfer took, and how much of it was compared afterwards."""

    seconds: float
    compared_bytes: int


def register(namespace: Namespace, shard_bytes: int, modes: tuple[Mode, ...]) -> Register:
    """Return the registration of a client with one group and one shard."""
    return Register(
        namespace=namespace, groups=(GroupSpec(kind=GroupKind.FULL, shard_bytes=shard_bytes),), shards=(0,), modes=modes
    )


class _Blocks:
    """A paged cache as an array: one block a chunk. Called from the adapter's transfer threads."""

    def __init__(self, blocks: int, shard_bytes: int) -> None:
        self.bytes: NDArray[np.uint8] = np.zeros((blocks, shard_bytes), np.uint8)
        self.locks = None

    def gather(self, group: int, block_ids: NDArray[np.int64], out: memoryview) -> None:
        """Copy the chunk's block into *out*."""
        del group
        np.frombuffer(out, np.uint8)[:] = self.bytes[int(block_ids[0])]

    def scatter(self, group: int, block_ids: NDArray[np.int64], skip_blocks: int, data: memoryview) -> None:
        """Copy the chunk into its block."""
        del group, skip_blocks
        self.bytes[int(block_ids[0])] = np.frombuffer(data, np.uint8)


class BenchClient:
    """A connected worker. A context manager; one thread."""

    def __init__(self, config: ClientConfig, namespace: Namespace, payload: Payload, blocks: int, mode: Mode) -> None:
        """Prepare a client with room for *blocks* chunks that moves bytes by *mode* alone."""
        config = msgspec.structs.replace(config, modes=(mode,))
        self.mode = mode
        self.session = Session(config, ClientKind.WORKER, register(namespace, payload.shard_bytes, (mode,)))
        self._payload = payload
        self._blocks = _Blocks(blocks, payload.shard_bytes)
        self._worker = WorkerAdapter(self.session.link, self._blocks, config)
        self._pause = threading.Event()

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            Failure: the server cannot be reached, refuses, or would move bytes in another way.
        """
        self.session.__enter__()
        if (mode := self.session.state.mode) is not self.mode:
            self.__exit__()
            raise Failure(f"the server chose {mode} instead of {self.mode}; see kvpool doctor")
        return self

    def __exit__(self, *_: object) -> None:
        """End the transfers, then the connection."""
        self._worker.close(CLOSE_S)
        self.session.__exit__()

    def lookup(self, chain: Chain, request_id: str) -> tuple[Found, bytes]:
        """Ask for all of *chain*; returns the answer and the lookup's id.

        Raises:
            Failure: the server refused or did not answer.
        """
        lookup_id = os.urandom(16)
        found, _ = self.session.call(Lookup(request_id=request_id, lookup_id=lookup_id), [chain.digests])
        return found, lookup_id

    def end(self, request_id: str) -> None:
        """Free what the request holds."""
        self.session.call(EndRequest(request_id=request_id))

    def store(self, chain: Chain, request_id: str) -> float:
        """Store all of *chain*; returns the seconds from the call to the answer that all is visible.

        Raises:
            Failure: it did not end, or not everything was kept.
        """
        ids = self._ids(chain)
        for i in range(chain.chunks):
            self._payload.fill(chain.digest(i), self._blocks.bytes[i])
        job = StoreJob(
            request_id=request_id, group=0, shard=0, first=0, parent=b"", digests=chain.digests, block_ids=ids
        )
        job.ready.set()
        start = time.perf_counter()
        self._worker.store(job)
        while request_id not in self._worker.poll().stored:
            self._pause.wait(POLL_S)
        seconds = time.perf_counter() - start
        self._all_visible(chain, request_id)
        return seconds

    def load(self, chain: Chain, request_id: str) -> Timed:
        """Look up and load all of *chain* into a zeroed cache, and compare every byte.

        Raises:
            Failure: chunks are missing, or a byte is wrong.
        """
        self._blocks.bytes[: chain.chunks] = 0
        found, lookup_id = self.lookup(chain, request_id)
        _expect(found, chain)
        job = LoadJob(
            request_id=request_id,
            lookup_id=lookup_id,
            group=0,
            shard=0,
            first=0,
            end=chain.chunks,
            block_ids=self._ids(chain),
        )
        start = time.perf_counter()
        self._worker.load(job)
        while request_id not in (loaded := self._worker.poll().loaded):
            self._pause.wait(POLL_S)
        seconds = time.perf_counter() - start
        self.end(request_id)
        if bad := loaded[request_id]:
            raise Failure(
                f"{len(bad)} of {chain.chunks} chunks of {chain.name} could not be loaded; see the server's log"
            )
        return Timed(seconds, self._compare(chain))

    def _compare(self, chain: Chain) -> int:
        for i in range(chain.chunks):
            if not self._payload.same(chain.digest(i), self._blocks.bytes[i]):
                raise Failure(
                    f"WRONG BYTES: chunk {i} of {chain.name} is not what was stored; no number of this run counts"
                )
        return chain.chunks * self._payload.shard_bytes

    def _all_visible(self, chain: Chain, request_id: str) -> None:
        found, _ = self.lookup(chain, request_id)
        self.end(request_id)
        _expect(found, chain)

    def _ids(self, chain: Chain) -> NDArray[np.int64]:
        return np.arange(chain.chunks, dtype=np.int64)[:, None]


def _expect(found: Found, chain: Chain) -> None:
    if found.chunks != chain.chunks:
        raise Failure(
            f"{found.chunks} of {chain.chunks} chunks of {chain.name} were found ({found.reason}); "
            "give the server more memory, or the bench less (--tokens, --shard-bytes)"
        )
