# SPDX-License-Identifier: Apache-2.0
"""An engine as the client's adapters see one: a scheduler, a worker, an array of blocks."""

import hashlib
import threading
from collections.abc import Callable
from contextlib import contextmanager
from time import monotonic

import numpy as np
from tests.fakes.blocks import NumpyBlocks

from kvpool.client.jobs import LoadJob, StoreJob
from kvpool.client.link import Link
from kvpool.client.scheduler import SchedulerAdapter
from kvpool.client.worker import WorkerAdapter
from kvpool.config import ClientConfig
from kvpool.model.identity import ClientKind, GroupKind, GroupSpec, Mode, Namespace
from kvpool.wire.messages import Register

BLOCK_BYTES = 16 << 10
CHUNK_BLOCKS = 8
CHUNK_BYTES = BLOCK_BYTES * CHUNK_BLOCKS


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> object:
    """Wait for *condition*; returns its value, fails after *timeout_s*."""
    ends_s, pause = monotonic() + timeout_s, threading.Event()
    while not (value := condition()):
        assert monotonic() < ends_s, "the condition did not come true in time"
        pause.wait(0.002)
    return value


def digests(count: int, seed: str = "") -> bytes:
    """Digests of *count* chunks of one made-up prompt."""
    return b"".join(hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(count))


def registration(
    modes: tuple[Mode, ...] = (), *, shard_bytes: int = CHUNK_BYTES, model: str = "m", **fields
) -> Register:
    namespace = Namespace(
        model=model, model_fingerprint="f", dtype="bf16", kv_dtype="bf16", layout="l", hash_algorithm="test"
    )
    groups = (GroupSpec(kind=GroupKind.FULL, shard_bytes=shard_bytes),)
    return Register(**({"namespace": namespace, "groups": groups, "shards": (0,), "modes": modes} | fields))


class FakeEngine:
    """One scheduler and one worker of a made-up engine; use as a context manager."""

    def __init__(
        self, address: str, *modes: Mode, blocks=256, block_bytes=BLOCK_BYTES, model="m", queue_jobs=64, **config
    ):
        self.config = ClientConfig(server=address, **({"transfer_s": 10.0} | config))
        modes = modes or self.config.modes
        shard_bytes = block_bytes * CHUNK_BLOCKS
        self.blocks = NumpyBlocks(blocks, block_bytes)
        self.worker_link = Link(self.config, ClientKind.WORKER)
        self.worker_link.registration = registration(modes, shard_bytes=shard_bytes, model=model)
        self.scheduler_link = Link(self.config, ClientKind.SCHEDULER)
        self.scheduler_link.registration = registration(shard_bytes=shard_bytes, model=model)
        self.worker = WorkerAdapter(self.worker_link, self.blocks, self.config, queue_jobs=queue_jobs)
        self.scheduler = SchedulerAdapter(self.scheduler_link, self.config)
        self.stored: list[str] = []
        self.loaded: list[tuple[str, frozenset[int]]] = []

    def __enter__(self):
        self.worker_link.start()
        self.scheduler_link.start()
        return self

    def __exit__(self, *exc):
        self.blocks.gate.set()
        self.worker.close(5.0)
        self.worker_link.close(0.5)
        self.scheduler_link.close(0.5)

    def healthy(self, timeout_s=10.0):
        """Wait until both links are."""
        assert self.worker_link.wait_healthy(timeout_s), self.worker_link.state
        assert self.scheduler_link.wait_healthy(timeout_s), self.scheduler_link.state
        return self

    def poll(self):
        """Collect what ended, as an engine's step does."""
        ended = self.worker.poll()
        self.stored += sorted(ended.stored)
        self.loaded += ended.loaded.items()
        return ended

    def begin_store(self, keys: bytes, first_block=0, *, request_id="s", ready=True) -> StoreJob:
        chunks = len(keys) // 32
        ids = np.arange(first_block, first_block + chunks * CHUNK_BLOCKS).reshape(chunks, -1)
        job = StoreJob(request_id=request_id, group=0, shard=0, first=0, parent=b"", digests=keys, block_ids=ids)
        if ready:
            job.ready.set()
        self.worker.store(job)
        return job

    def store(self, keys: bytes, first_block=0, *, request_id="s") -> None:
        """Store and wait for the end, good or not."""
        before = len(self.stored)
        self.begin_store(keys, first_block, request_id=request_id)
        until(lambda: self.poll() and len(self.stored) > before)

    def lookup(self, keys: bytes, request_id="l"):
        """Look up and wait for the answer."""
        self.scheduler.lookup(request_id, keys)
        return until(lambda: self.scheduler.answer(request_id))

    def begin_load(
        self, answer, first_block, *, request_id="l", chunks=None, first=0, skip_blocks=0, after=None
    ) -> LoadJob:
        end = answer.chunks if chunks is None else first + chunks
        ids = np.arange(first_block, first_block + (end - first) * CHUNK_BLOCKS).reshape(end - first, -1)
        job = LoadJob(
            request_id=request_id,
            lookup_id=answer.lookup_id,
            group=0,
            shard=0,
            first=first,
            end=end,
            block_ids=ids,
            skip_blocks=skip_blocks,
            after=after,
        )
        self.worker.load(job)
        return job

    def load(self, answer, first_block, **options) -> frozenset[int]:
        """Load and wait for the end; returns the bad blocks."""
        before = len(self.loaded)
        self.begin_load(answer, first_block, **options)
        until(lambda: self.poll() and len(self.loaded) > before)
        return self.loaded[-1][1]

    def bytes_of(self, first_block, chunks):
        """A copy of the blocks of some chunks."""
        return self.blocks.memory[first_block : first_block + chunks * CHUNK_BLOCKS].copy()


@contextmanager
def engines(*fakes: FakeEngine):
    """Run several engines, all healthy."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield [stack.enter_context(fake).healthy() for fake in fakes]
