# SPDX-License-Identifier: Apache-2.0
"""The connector's halves of one engine whose ranks use several servers, scripted or real, without the engine."""

import numpy as np
from tests.fakes.clients import until
from tests.fakes.engine_parts import BLOCK, CHUNK, FakeRequest, engine_config
from tests.unit.connector.test_halves import Tensor

from kvpool.config import ClientConfig
from kvpool.connector.halves import SchedulerHalf, WorkerHalf
from kvpool.connector.plan import encode
from kvpool.connector.scheduler import Step
from kvpool.connector.translate import engine_facts

BLOCKS = 64
PROMPT = list(range(40))
CHUNKS = 2


class RanksApart:
    """One scheduler's half and its ranks, each with a server of its own.

    Args:
        addresses: what each rank calls its server.
        nodes: where each rank is; all of them here if not given. The scheduler is where the first one is.
        own: more settings of each rank.
        config: settings of all.
    """

    def __init__(self, addresses, nodes=(), own=(), **config):
        config = {"transfer_s": 5.0, "request_s": 0.5, "lookup_s": 1.0, "connect_s": 1.0} | config
        nodes, own = nodes or ["here"] * len(addresses), own or [{}] * len(addresses)
        rng = np.random.default_rng(7)
        self.caches, self.workers, self.now_s = [], [], 0.0
        for number, (address, node) in enumerate(zip(addresses, nodes, strict=True)):
            cache = {n: rng.random((BLOCKS, 2, BLOCK, 8), np.float32) for n in ("layers.0", "layers.1")}
            worker = WorkerHalf(ClientConfig(server=address, **(config | own[number])), node)
            facts = engine_facts(
                *engine_config(parallel_config__rank=number, parallel_config__tensor_parallel_size=len(addresses)),
                hash_tokens=BLOCK,
                fingerprints=None,
            )
            worker.register(facts, {n: Tensor(a) for n, a in cache.items()}, {"layers.0": "p", "layers.1": "p"})
            self.caches.append(cache)
            self.workers.append(worker)
        self.scheduler = SchedulerHalf(ClientConfig(server=addresses[0], **(config | own[0])), nodes[0])
        self.scheduler.attach([encode(worker.facts) for worker in self.workers])

    def healthy(self, timeout_s=10.0):
        for half in (self.scheduler, *self.workers):
            until(lambda half=half: half.attachment.uncached() is None, timeout_s)
        return self

    def close(self):
        for half in (self.scheduler, *self.workers):
            half.close()

    def step(self, *scheduled, blocks=(), idle=False):
        """Plan and run one step; returns the requests whose loads ended on each rank, and the bad blocks."""
        plan = self.scheduler.plan(Step(scheduled, lambda _: [blocks], idle=idle))
        loaded, bad = [], set()
        for worker in self.workers:
            worker.preempt(plan)
            worker.begin(plan)
            worker.load(plan)
            worker.saved(ran=True)
            loaded.append(worker.results(plan)[1])
            bad |= worker.bad_blocks()
        return plan, loaded, bad

    def compute(self, request_id, blocks):
        """A request that is computed and stored whole; returns the plan."""
        request = FakeRequest(request_id, PROMPT)
        self.scheduler.arrived(request, 0.0)
        until(lambda: self.matched(request) is not None)
        self.scheduler.allocated(request_id, [blocks], 0)
        plan, *_ = self.step((request_id, len(PROMPT)), blocks=blocks)
        for worker in self.workers:
            until(lambda worker=worker: request_id not in worker._transfers._ledger._stores)
        self.scheduler.finished(request_id)
        return plan

    def matched(self, request):
        return self.scheduler.matched(request, 0, 0.0)[0]

    def hit(self, request_id):
        request = FakeRequest(request_id, PROMPT)
        self.scheduler.arrived(request, 0.0)
        return until(lambda: (tokens := self.matched(request)) is not None and (tokens,))[0]

    def load(self, request_id, blocks):
        """Load a hit; returns the bad blocks of all ranks."""
        self.scheduler.allocated(request_id, [blocks], CHUNKS * CHUNK)
        _, first, bad = self.step()
        ended = [set(loaded) for loaded in first]

        def all_ended():
            _, loaded, more = self.step(idle=True)
            bad.update(more)
            for mine, new in zip(ended, loaded, strict=True):
                mine.update(new)
            return all(ended)

        until(all_ended)
        return bad
