# SPDX-License-Identifier: Apache-2.0
"""One engine's worth of random work through the product's own adapters, in a process of its own.

    python -m tests.fakes.fault_client ORDER      ORDER: JSON, see ``Order``

Bytes carry the identity of their chunk, and several clients share few prompts. A store or load that does not end, a
lookup without an answer, a byte that is not the chunk's: each is told on standard output and ends the process with 3.
Before its end it has given everything back. Every few operations it tells what it has done so far.
"""

import os
import random
import signal
import sys
import threading
import time
from collections import Counter

import msgspec
import numpy as np
from tests.fakes.blocks import NumpyBlocks

from kvpool.cli.bench.client import register
from kvpool.cli.bench.payload import Chain, Payload, bench_namespace, make_chain
from kvpool.client.jobs import Answer, LoadJob, StoreJob
from kvpool.client.link import Link
from kvpool.client.scheduler import SchedulerAdapter
from kvpool.client.worker import WorkerAdapter
from kvpool.config import ClientConfig
from kvpool.model.identity import ClientKind, Mode
from kvpool.model.keys import DIGEST_BYTES

CHUNK_TOKENS = 16
MOST_CHUNKS = 12
PROMPTS = 6
REQUEST_S, LOOKUP_S, TRANSFER_S = 0.5, 0.5, 2.0
HEALTHY_S = 3.0
HANG_S = 60.0
"""Far above every deadline: machines are busy, and what hangs, hangs for ever."""
POLL_S = 0.0005
TELL_OPS = 10
OUR_FAULT = 3


class Order(msgspec.Struct):
    """What one client is to do."""

    server: str
    mode: str
    seed: int
    ops: int
    shard_bytes: int


class WrongError(Exception):
    """What must never be; the text says what."""


class FaultClient:
    """See the module."""

    def __init__(self, order: Order) -> None:
        self.chance = random.Random(order.seed)
        self.counts: Counter[str] = Counter()
        self.ending = False
        """Set to begin no further operation."""
        self._order = order
        mode = Mode(order.mode)
        config = ClientConfig(
            server=order.server,
            modes=(mode,),
            connect_s=1.0,
            request_s=REQUEST_S,
            lookup_s=LOOKUP_S,
            transfer_s=TRANSFER_S,
        )
        namespace = bench_namespace(order.shard_bytes, 0)
        self._payload = Payload(order.shard_bytes, 0)
        self._chains = [make_chain(namespace, n, MOST_CHUNKS * CHUNK_TOKENS, CHUNK_TOKENS, 0) for n in range(PROMPTS)]
        self._blocks = NumpyBlocks(2 * MOST_CHUNKS, order.shard_bytes)
        self._links = [Link(config, kind) for kind in (ClientKind.WORKER, ClientKind.SCHEDULER)]
        for link in self._links:
            modes = (mode,) if link.kind is ClientKind.WORKER else ()
            link.registration = register(namespace, order.shard_bytes, modes)
            link.start()
        self._worker = WorkerAdapter(self._links[0], self._blocks, config)
        self._scheduler = SchedulerAdapter(self._links[1], config)
        self._pause = threading.Event()
        self._stored: set[str] = set()
        self._loaded: dict[str, frozenset[int]] = {}

    def run(self) -> None:
        """Do the ordered number of operations.

        Raises:
            WrongError: something hung, or a byte was wrong.
        """
        kinds = (self._store, self._load, self._forget, self._free_some)
        for number in range(self._order.ops):
            if self.ending:
                break
            # What is done without a server says little: wait a while for one.
            healthy = [link.wait_healthy(HEALTHY_S) for link in self._links]
            (kind,) = self.chance.choices(kinds, (4, 5, 1, 1))
            kind(f"{self._order.seed}-{number}")
            self.counts["ops"] += 1
            self.counts["ops without a server"] += not all(healthy)
            if self.counts["ops"] % TELL_OPS == 0:
                self.tell()
        self.tell()

    def tell(self) -> None:
        """Say what was done so far."""
        sys.stdout.write(msgspec.json.encode(self.counts).decode() + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Give everything back."""
        self._worker.close(TRANSFER_S)
        for link in self._links:
            link.close()

    def _store(self, request_id: str) -> None:
        chain, end = self._prompt()
        first = self.chance.randrange(end)
        ids = np.arange(end - first, dtype=np.int64)[:, None]
        for i in range(end - first):
            self._payload.fill(chain.digest(first + i), self._blocks.memory[i])
        job = StoreJob(
            request_id=request_id,
            group=0,
            shard=0,
            first=first,
            parent=chain.digest(first - 1) if first else b"",
            digests=chain.digests[first * DIGEST_BYTES : end * DIGEST_BYTES],
            block_ids=ids,
        )
        job.ready.set()
        self._worker.store(job)
        self._until(lambda: request_id in self._stored, "a store")
        self._stored.discard(request_id)

    def _load(self, request_id: str) -> None:
        found, chain = self._lookup(request_id)
        if found.chunks:
            blocks = self._blocks.memory[MOST_CHUNKS : MOST_CHUNKS + found.chunks]
            blocks[:] = 0
            ids = np.arange(MOST_CHUNKS, MOST_CHUNKS + found.chunks, dtype=np.int64)[:, None]
            self._worker.load(
                LoadJob(
                    request_id=request_id,
                    lookup_id=found.lookup_id,
                    group=0,
                    shard=0,
                    first=0,
                    end=found.chunks,
                    block_ids=ids,
                )
            )
            self._until(lambda: request_id in self._loaded, "a load")
            self._compare(chain, found.chunks, self._loaded.pop(request_id))
        self._scheduler.end(request_id)

    def _forget(self, request_id: str) -> None:
        """Look up and end at once, whatever the answer will be."""
        chain, end = self._prompt()
        self._scheduler.lookup(request_id, chain.digests[: end * DIGEST_BYTES])
        self._scheduler.end(request_id)

    def _free_some(self, request_id: str) -> None:
        found, _ = self._lookup(request_id)
        if found.chunks:
            self._scheduler.free(request_id, self.chance.randrange(found.chunks), found.chunks)
        self._scheduler.end(request_id)

    def _lookup(self, request_id: str) -> tuple[Answer, Chain]:
        chain, end = self._prompt()
        self._scheduler.lookup(request_id, chain.digests[: end * DIGEST_BYTES])
        self._until(lambda: self._scheduler.answer(request_id) is not None, "a lookup")
        found = self._scheduler.answer(request_id)
        assert found is not None
        self.counts["hits" if found.chunks else "misses"] += 1
        return found, chain

    def _compare(self, chain: Chain, chunks: int, bad: frozenset[int]) -> None:
        for i in range(chunks):
            if MOST_CHUNKS + i in bad:
                self.counts["chunks lost"] += 1
            elif self._payload.same(chain.digest(i), self._blocks.memory[MOST_CHUNKS + i]):
                self.counts["chunks compared"] += 1
            else:
                raise WrongError(f"WRONG BYTES in chunk {i} of {chain.name}")

    def _prompt(self) -> tuple[Chain, int]:
        return self.chance.choice(self._chains), self.chance.randint(1, MOST_CHUNKS)

    def _until(self, done, what: str) -> None:
        ends_s = time.monotonic() + HANG_S
        while True:
            finished = self._worker.poll()
            self._stored |= finished.stored
            self._loaded |= finished.loaded
            if done():
                return
            if time.monotonic() > ends_s:
                raise WrongError(f"{what} HANGS for {HANG_S:.0f} s")
            self._pause.wait(POLL_S)


def main() -> int:
    order = msgspec.json.decode(sys.argv[1], type=Order)
    client = FaultClient(order)
    signal.signal(signal.SIGTERM, lambda *_: setattr(client, "ending", True))
    try:
        client.run()
    except WrongError as e:
        sys.stdout.write(f"seed {order.seed}: {e}\n")
        sys.stdout.flush()
        os._exit(OUR_FAULT)
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
