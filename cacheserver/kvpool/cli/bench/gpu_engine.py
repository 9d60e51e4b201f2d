# SPDX-License-Identifier: Apache-2.0
"""An engine's cache on a device, as the GPU bench sees one: random pages, the real connector's way to reach them."""

import gc
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Self

import numpy as np
import torch

from kvpool.cli.bench.payload import bench_namespace
from kvpool.cli.errors import Failure
from kvpool.client.jobs import Answer, LoadJob, StoreJob
from kvpool.client.link import Link
from kvpool.client.scheduler import SchedulerAdapter
from kvpool.client.state import LinkState
from kvpool.client.worker import WorkerAdapter
from kvpool.config import ClientConfig
from kvpool.connector.memory import Ring, reach
from kvpool.model.identity import ClientKind, GroupKind, GroupSpec, Mode
from kvpool.model.keys import DIGEST_BYTES
from kvpool.model.reasons import UncachedReason
from kvpool.transfer.planes import Layout, Plane
from kvpool.transfer.tensors import Storage
from kvpool.wire.messages import Register, Welcome

__all__ = ["BLOCK_TOKENS", "PLANES", "Cache", "GpuEngine", "NotReadyError", "Request", "freeze_garbage", "use_device"]

PLANES: Final = 64
"""32 layers, keys and values apart."""

BLOCK_TOKENS: Final = 16
_READY_S: Final = 60.0
_POLL_S: Final = 0.0005
_POISON: Final = 0xA5
_PAUSE: Final = threading.Event()


class NotReadyError(Failure):
    """The server cannot be used in the wanted mode, or not in time."""


def use_device(number: int) -> None:
    """Let this thread, and the engine that it makes, use the device of that number, as a worker of an engine does."""
    torch.cuda.set_device(number)
    torch.zeros(1, device="cuda")


class Cache:
    """Pages of *run* bytes in each plane; the first half is stored from, the second half loaded into."""

    def __init__(self, run: int, tokens: int, chunk_tokens: int, seed: int) -> None:
        """Fill it with random bytes; both halves' blocks are in random order."""
        self.run, self.per_chunk = run, chunk_tokens // BLOCK_TOKENS
        self.chunks = tokens // chunk_tokens
        self.chunk_bytes = PLANES * self.per_chunk * run
        pages = 2 * self.chunks * self.per_chunk
        made = torch.Generator(device="cuda").manual_seed(seed)
        self.pool = torch.randint(0, 256, (PLANES, pages, run), dtype=torch.uint8, device="cuda", generator=made)
        rng = np.random.default_rng(seed)
        halves = (rng.permutation(pages // 2), pages // 2 + rng.permutation(pages // 2))
        self.sources, self.targets = (half.reshape(self.chunks, -1).astype(np.int64) for half in halves)
        planes = tuple(
            Plane(name=str(n), storage=0, offset=n * pages * run, stride=run, block_bytes=run, packing="bench")
            for n in range(PLANES)
        )
        self.layout = Layout(planes=planes, blocks=pages, block_tokens=BLOCK_TOKENS)
        self.storage = Storage("cuda", torch.cuda.current_device(), self.pool.data_ptr(), self.pool.numel())

    def poison(self) -> None:
        """Overwrite all targets."""
        self.pool[:, self.pool.shape[1] // 2 :] = _POISON
        torch.cuda.synchronize()

    def differs(self) -> bool:
        """True if a target is not what its source is."""
        sources, targets = (torch.from_numpy(ids.ravel()).cuda() for ids in (self.sources, self.targets))
        return not all(torch.equal(plane[sources], plane[targets]) for plane in self.pool)


class Request:
    """One prompt's keys; random, so that none is known before."""

    def __init__(self, chunks: int) -> None:
        self.name = secrets.token_hex(8)
        self.keys = secrets.token_bytes(chunks * DIGEST_BYTES)
        self.chunks = chunks


class GpuEngine:
    """A worker and a scheduler of one engine; a context manager. One thread."""

    def __init__(self, config: ClientConfig, cache: Cache, chunk_tokens: int) -> None:
        """Reach the cache as the connector does."""
        self.cache, self._config = cache, config
        namespace = bench_namespace(cache.chunk_bytes, chunk_tokens)
        groups = (GroupSpec(kind=GroupKind.FULL, shard_bytes=cache.chunk_bytes),)
        self._base = Register(namespace=namespace, groups=groups, shards=(0,), modes=config.modes)
        torch.cuda.synchronize()
        self._reach = reach([cache.layout], [cache.storage], config)
        self.worker_link = Link(config, ClientKind.WORKER, on_state=self._on_state, accept=self._accept)
        self.scheduler_link = Link(config, ClientKind.SCHEDULER)
        self.scheduler_link.registration = Register(namespace=namespace, groups=groups, shards=(0,))
        rings = self._reach.ring.keeper if self._reach.ring is not None else None
        self.worker = WorkerAdapter(self.worker_link, self._reach.blocks, config, rings=rings)
        self.scheduler = SchedulerAdapter(self.scheduler_link, config)

    @property
    def ring(self) -> Ring | None:
        """The ring, if there is one."""
        return self._reach.ring

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            NotReadyError: no server, or not in the wanted mode.
        """
        try:
            self._get_ready()
        except BaseException:
            self.__exit__()
            raise
        freeze_garbage()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self.worker.close(5.0)
        self.worker_link.close()
        self.scheduler_link.close()

    def store(self, request: Request) -> None:
        """Begin a store of the cache's sources."""
        job = StoreJob(
            request_id=request.name,
            group=0,
            shard=0,
            first=0,
            parent=b"",
            digests=request.keys,
            block_ids=self.cache.sources[: request.chunks],
            after=self._reach.moment(),
        )
        job.ready.set()
        self.worker.store(job)

    def found(self, request: Request) -> Answer:
        """Look a request up.

        Raises:
            Failure: not all of it is there.
        """
        self.scheduler.lookup(request.name, request.keys)
        answer: Answer = self._until(lambda: self.scheduler.answer(request.name))
        if answer.chunks != request.chunks:
            raise Failure(f"{answer.chunks} of {request.chunks} chunks were found after a store: {self.told()}")
        return answer

    def load(self, request: Request, answer: Answer) -> None:
        """Begin a load into the cache's targets."""
        job = LoadJob(
            request_id=request.name,
            lookup_id=answer.lookup_id,
            group=0,
            shard=0,
            first=0,
            end=request.chunks,
            block_ids=self.cache.targets[: request.chunks],
            after=self._reach.moment(),
        )
        self.worker.load(job)

    def ended(self) -> tuple[frozenset[str], dict[str, frozenset[int]]]:
        """Wait until something ended; returns stores, and loads with their bad blocks."""
        finished = self.worker.poll(_READY_S)
        if not (finished.stored or finished.loaded):
            raise Failure("nothing ended within a minute")
        return finished.stored, finished.loaded

    def told(self) -> str:
        """Say what became of jobs so far, and why there is no ring."""
        return f"{self.worker.counters()}; ring: {self._why() or 'joined'}"

    def _get_ready(self) -> None:
        if self._reach.ring is not None:
            self._reach.ring.keeper.begin(self.worker_link)
        for link in (self.worker_link, self.scheduler_link):
            link.start()
            if not link.wait_healthy(_READY_S):
                raise NotReadyError(f"the server cannot be used: {link.state.detail}")
        wanted = self._config.modes[0]
        if self.worker_link.state.mode is not wanted:
            why = self._reach.why_no_ring or self.worker_link.state.mode
            raise NotReadyError(f"mode {wanted} was not agreed on: {why}")
        self._until(lambda: wanted not in (Mode.RING, Mode.MAPPED) or not self._why())

    def _why(self) -> str:
        return self._reach.ring.keeper.reason if self._reach.ring is not None else self._reach.why_no_ring

    def _until(self, condition: Callable[[], object]) -> Any:
        ends_s = time.monotonic() + _READY_S
        while not (value := condition()):
            if time.monotonic() > ends_s:
                raise NotReadyError(f"the server did not get ready: {self._why()}")
            _rest()
        return value

    def _on_state(self, state: LinkState) -> None:
        if self._reach.ring is not None:
            self._reach.ring.keeper.on_state(state)

    def _accept(self, _welcome: Welcome) -> UncachedReason | None:
        ring = self._reach.ring
        if ring is None:
            self.worker_link.registration = self._base
        else:
            ring.offer.fit([self.cache.per_chunk])
            self.worker_link.registration = ring.keeper.equip(self._base)
        return None


def freeze_garbage() -> None:
    """Let no collection look through what is alive by now, as vLLM's worker does before it serves.

    With torch imported a full one takes 0.15 s, in which no thread of this process launches anything.
    """
    gc.collect()
    gc.freeze()


def _rest() -> None:
    """Let other threads have the interpreter for a moment."""
    _PAUSE.wait(_POLL_S)
