# SPDX-License-Identifier: Apache-2.0
"""One engine whose ranks each have a server of their own: rank n keeps shard n at server n."""

import numpy as np
from tests.fakes.blocks import POISON, NumpyBlocks
from tests.fakes.clients import BLOCK_BYTES, CHUNK_BLOCKS, registration, until

from kvpool.client.group import Member, scheduler_over
from kvpool.client.jobs import LoadJob, StoreJob
from kvpool.client.link import Link
from kvpool.client.worker import WorkerAdapter
from kvpool.config import ClientConfig
from kvpool.model.identity import ClientKind, Namespace
from kvpool.wire import messages as m


class Rank:
    """One worker, and the scheduler's link to its server."""

    def __init__(self, number, ranks, address, model, config):
        self.number = number
        self.config = ClientConfig(server=address, **config)
        self.blocks = NumpyBlocks(256, BLOCK_BYTES)
        self.blocks.fill(number)
        self.link = Link(self.config, ClientKind.WORKER)
        self.asking = Link(self.config, ClientKind.SCHEDULER)
        namespace = Namespace(
            model=model,
            model_fingerprint="f",
            dtype="bf16",
            kv_dtype="bf16",
            layout="l",
            hash_algorithm="test",
            shard_count=ranks,
        )
        self.link.registration = registration(self.config.modes, namespace=namespace, shards=(number,))
        self.asking.registration = registration(namespace=namespace, shards=(number,))
        self.worker = WorkerAdapter(self.link, self.blocks, self.config)
        self.stored, self.loaded = set(), {}

    def close(self):
        self.worker.close(2.0)
        self.link.close(0.5)
        self.asking.close(0.5)

    def healthy(self):
        return self.link.state.healthy and self.asking.state.healthy

    def store(self, keys, request_id="s"):
        """Keep the chunks that are in the blocks from 0 on; waits for the end."""
        self.begin_store(keys, request_id)
        self.end_store(request_id)

    def end_store(self, request_id="s"):
        """Wait until a store that was begun has ended, well or not."""
        until(lambda: self._poll() and request_id in self.stored)
        self.stored.discard(request_id)

    def begin_store(self, keys, request_id="s"):
        """Begin to keep the chunks that are in the blocks from 0 on."""
        ids = np.arange(len(keys) // 32 * CHUNK_BLOCKS).reshape(-1, CHUNK_BLOCKS)
        job = StoreJob(
            request_id=request_id, group=0, shard=self.number, first=0, parent=b"", digests=keys, block_ids=ids
        )
        job.ready.set()
        self.worker.store(job)

    def load(self, answer, first_block, request_id="l"):
        """Load the answer's chunks; returns the bad blocks."""
        self.begin_load(answer, first_block, request_id)
        return self.end_load(request_id)

    def end_load(self, request_id="l"):
        """Wait until a load that was begun has ended; returns the bad blocks."""
        until(lambda: self._poll() and request_id in self.loaded)
        return self.loaded.pop(request_id)

    def begin_load(self, answer, first_block, request_id="l"):
        """Begin to load the answer's chunks into blocks that are poisoned before."""
        self.blocks.memory[first_block:] = POISON
        ids = np.arange(first_block, first_block + answer.chunks * CHUNK_BLOCKS).reshape(-1, CHUNK_BLOCKS)
        self.worker.load(
            LoadJob(
                request_id=request_id,
                lookup_id=answer.lookup_id,
                group=0,
                shard=self.number,
                first=0,
                end=answer.chunks,
                block_ids=ids,
            )
        )

    def _poll(self):
        """Take in what ended."""
        finished = self.worker.poll()
        self.stored |= finished.stored
        self.loaded |= finished.loaded
        return True

    def leases(self):
        """Leases of all clients of the rank's server."""
        return self.asking.call(m.Stats())[0].leases


class RankGroup:
    """All ranks, and the scheduler's adapter over their servers; use as a context manager."""

    def __init__(self, addresses, model, **config):
        config = {"transfer_s": 5.0, "request_s": 0.5, "lookup_s": 0.5} | config
        self.ranks = [Rank(n, len(addresses), address, model, config) for n, address in enumerate(addresses)]
        self.shards = tuple(range(len(addresses)))
        self.scheduler = scheduler_over(
            [Member(rank.config.server, rank.asking, (rank.number,)) for rank in self.ranks], self.ranks[0].config
        )

    def __enter__(self):
        for rank in self.ranks:
            rank.link.start()
            rank.asking.start()
        return self

    def __exit__(self, *exc):
        for rank in self.ranks:
            rank.close()

    def healthy(self, timeout_s=30):
        until(lambda: all(rank.healthy() for rank in self.ranks), timeout_s)
        return self

    def lookup(self, keys, request_id="l"):
        """Look up and wait for the answer."""
        self.scheduler.lookup(request_id, keys, self.shards)
        return until(lambda: self.scheduler.answer(request_id))

    def no_leases(self, *ranks):
        """Wait until no server of these ranks (all of them) holds a lease."""
        for rank in ranks or self.ranks:
            until(lambda rank=rank: rank.leases() == 0)
