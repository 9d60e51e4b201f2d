# SPDX-License-Identifier: Apache-2.0
"""A model of the engine around the connector: its scheduler, its blocks, its worker, a cache server, all at random.

It follows what vLLM's scheduler was seen to do: local prefix cache with shared blocks, chunked prefill, asynchronous
loads, preemption when blocks run out, aborts at any time, delayed frees, and (with ``depth`` 2) steps that are planned
before the results of the step before are known. With a *window* the engine has a second cache group, whose blocks it
takes back as the window moves on, and no local prefix cache. Each token slot of each block holds a value that depends
on the whole prefix, so that a wrong byte anywhere is noticed by whoever reads it. The checks are asserts in this file.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field
from random import Random

from tests.fakes.engine_parts import BLOCK, CHUNK, GROUPS, PER_CHUNK, FakeLookups, FakeRequest, chunk_keys

from kvpool.client.jobs import Answer, Finished
from kvpool.connector.attach import Session
from kvpool.connector.hits import Hits
from kvpool.connector.plan import GroupFacts, StepPlan, decode, encode
from kvpool.connector.scheduler import SchedulerSide, Step
from kvpool.connector.worker import WorkerSide
from kvpool.model.identity import GroupKind, Role
from kvpool.model.layout import NOWHERE

GARBAGE = b"garbage"


def slot_value(request, position, group=0):
    """What a group's cache holds for one token: it depends on all tokens up to it, and on the salt."""
    prefix = repr((group, request.cache_salt, request.all_token_ids[: position + 1]))
    return hashlib.blake2b(prefix.encode(), digest_size=8).digest()


@dataclass(eq=False)
class Run(FakeRequest):
    """A request with the engine's state of it."""

    status: str = "waiting"
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    window_blocks: list[int] = field(default_factory=list)
    """0 where the engine keeps nothing (any more)."""

    settled: int = 0
    """Tokens whose results are known."""

    max_tokens: int = 4
    in_flight: int = 0
    failed: bool = False
    failed_before: bool = False


class Pool:
    """Blocks with reference counts and a prefix cache; block 0 is nobody's."""

    def __init__(self, count):
        self.memory = {b: [None] * BLOCK for b in range(1, count + 1)}
        self.free = deque(self.memory)
        self.references = dict.fromkeys(self.memory, 0)
        self.cached = {}

    def take(self, count):
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            self.references[block] = 1
            self.cached = {h: b for h, b in self.cached.items() if b != block}
        return taken

    def share(self, block):
        if not self.references[block]:
            self.free.remove(block)
        self.references[block] += 1

    def drop(self, blocks):
        for block in filter(None, reversed(blocks)):
            assert self.references[block] > 0, "freed twice"
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)

    def hit(self, request):
        """Blocks of the longest cached prefix that leaves a token to compute."""
        found = []
        for hashed in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if hashed not in self.cached:
                break
            found.append(self.cached[hashed])
        return found

    def cache(self, request, tokens):
        for hashed, block in zip(request.block_hashes[: tokens // BLOCK], request.blocks, strict=False):
            self.cached.setdefault(hashed, block)


class Transfers:
    """A worker adapter that moves one chunk whenever the model says so, against a server that forgets and fails."""

    def __init__(self, engine):
        self.engine = engine
        self.stores = []
        self.loads = []
        self.finished = {}

    def store(self, job):
        self.stores.append([job, 0])

    def load(self, job):
        self.loads.append([job, 0, set()])

    def settle_stores(self, jobs, patience_s, timeout_s):  # noqa: ARG002
        """Some gathers are in time, the others are cut off."""
        for work in [s for s in self.stores if any(s[0] is job for job in jobs)]:
            while work in self.stores and self.engine.random.random() < 0.7:
                self._gather(work)
            if work in self.stores:
                self.stores.remove(work)
                work[0].gathered.set()
        return True

    def advance(self):
        """Do one random piece of work."""
        ready = [s for s in self.stores if s[0].ready.is_set()] + self.loads
        if ready:
            work = self.engine.random.choice(ready)
            self._gather(work) if len(work) == 2 else self._scatter(work)

    def _gather(self, work):
        job, chunk = work
        blocks = job.block_ids[chunk].tolist()
        digest = job.digests[chunk * 32 : chunk * 32 + 32]
        there = [place for place, block in enumerate(blocks) if block != NOWHERE]
        for place in there:
            good = self.engine.truth[job.group, digest][place]
            assert self.engine.pool.memory[blocks[place]] == good, "a wrong chunk is stored under a good name"
        self.engine.lookups.keep(job.group, digest, there)
        work[1] += 1
        if work[1] == job.chunks:
            self.stores.remove(work)
            job.gathered.set()

    def _scatter(self, work):
        job, chunk, bad = work
        digests = self.engine.lookups.digests_of[job.lookup_id]
        digest = digests[(job.first + chunk) * 32 : (job.first + chunk) * 32 + 32]
        kept = self.engine.lookups.kept(job.group, digest)
        good = kept is not None and self.engine.random.random() > self.engine.failure_rate
        for place, block in enumerate(job.block_ids[chunk].tolist()):
            if place >= job.skipped(chunk):
                self.engine.may_write(block, job.request_id)
                assert not good or place in kept, "a chunk is a hit without what the hit needs"
                truth = self.engine.truth[job.group, digest][place]
                self.engine.pool.memory[block] = list(truth) if good else [GARBAGE] * BLOCK
                if not good:
                    bad.add(block)
        work[1] += 1
        if work[1] == job.chunks:
            self.loads.remove(work)
            self.finished[job.request_id] = self.finished.get(job.request_id, frozenset()) | bad

    def poll(self):
        running = {job.request_id for job, *_ in self.loads}
        loaded = {r: bad for r, bad in self.finished.items() if r not in running}
        self.finished = {r: bad for r, bad in self.finished.items() if r in running}
        return Finished(frozenset(), loaded)

    def has_stores(self, request_id):
        return any(job.request_id == request_id for job, _ in self.stores)

    def cancel_stores(self, request_ids, timeout_s):  # noqa: ARG002
        self.stores = [s for s in self.stores if s[0].request_id not in set(request_ids)]
        return True

    def close(self, timeout_s):
        """Never called: nothing fails here but loads."""
        raise AssertionError(timeout_s)


class Lookups(FakeLookups):
    """Answers late, and remembers which digests a lookup id stands for."""

    def __init__(self, reach):
        super().__init__()
        self.prompt = False
        self.digests_of = {}
        self.reach = reach
        """Chunks at the end of a prefix that the second group needs; 0 without one."""

        self.windows = {}
        """The second group: digest to which of the chunk's blocks are kept."""

    def keep(self, group, digest, places):
        if group:
            self.windows[digest] = set(places)
        else:
            self.held.add(digest)

    def kept(self, group, digest):
        """Which blocks of a chunk are kept; None if it is not."""
        if group:
            return self.windows.get(digest)
        return set(range(PER_CHUNK)) if digest in self.held else None

    def settle(self):
        for request_id, digests in self.open.items():
            if request_id not in self.answers:
                names = [digests[i : i + 32] for i in range(0, len(digests), 32)]
                chunks = next((n for n, name in enumerate(names) if name not in self.held), len(names))
                while any(name not in self.windows for name in names[max(0, chunks - self.reach) : chunks][::-1]):
                    if not self.reach:
                        break
                    chunks -= 1
                self.answers[request_id] = Answer(chunks, request_id.encode() if chunks else b"")

    def lookup(self, request_id, digests, shards):
        super().lookup(request_id, digests, shards)
        self.digests_of[request_id.encode()] = digests


class EngineModel:
    """See the module. ``act`` does one random thing; ``drain`` lets everything end."""

    def __init__(self, seed, *, depth=1, failure_rate=0.1, blocks=26, window=0):
        self.random = Random(seed)
        self.depth = depth
        self.failure_rate = failure_rate
        self.pool = Pool(blocks)
        self.requests = {}
        self.queue = []
        self.running = []
        self.preempted = set()
        self.steps = deque()
        self.session = Session(1, CHUNK, 60.0)
        self.truth = {}
        self.window = window
        self.lookups = Lookups(-(-window // CHUNK))
        second = GroupFacts(planes=(), block_tokens=BLOCK, kind=GroupKind.WINDOW, window_tokens=window, number=1)
        groups = (*GROUPS, second) if window else GROUPS
        hits = Hits(self.lookups, loads=True, shards=(0,), keys=lambda _: chunk_keys(), whole=not window)
        self.side = SchedulerSide(hits, role=Role.BOTH, groups=groups, store_generated=self.random.random() < 0.3)
        self.transfers = Transfers(self)
        self.worker = WorkerSide(
            self.transfers, place=(0, 0), writer=True, role=Role.BOTH, groups=groups, timeout_s=1.0
        )
        self.now_s = 0.0
        self.numbers = {"loads": 0, "stores": 0, "preempted": 0, "failed": 0, "aborted_loads": 0}

    # --- what may happen ------------------------------------------------------------------------------------------

    def act(self):
        choice = self.random.random()
        if choice < 0.15 and len(self.requests) < 8:
            self.arrive()
        elif choice < 0.2 and self.requests:
            self.abort(self.random.choice([*self.requests.values()]))
        elif choice < 0.25:
            self.session = None if self.session else Session(self.random.randrange(2, 1 << 30), CHUNK, 60.0)
        elif choice < 0.3:
            self.lookups.held = {d for d in sorted(self.lookups.held) if self.random.random() < 0.7}
            windows = sorted(self.lookups.windows.items())
            self.lookups.windows = {d: places for d, places in windows if self.random.random() < 0.7}
        elif choice < 0.35:
            self.pool.cached.clear()
        elif choice < 0.45:
            self.lookups.settle()
        elif choice < 0.65:
            self.transfers.advance()
        else:
            self.step()

    def drain(self):
        """Let all requests end; asserts that nothing is left."""
        self.failure_rate = 0.0
        for _ in range(2000):
            if not self.requests and not self.steps:
                break
            self.lookups.settle()
            self.transfers.advance()
            self.step()
        assert not self.requests, {r.request_id: r.status for r in self.requests.values()}
        assert sorted(self.pool.free) == sorted(self.pool.memory), "blocks are held for ever"
        assert self.lookups.open == {}, "lookups are pinned for ever"
        assert not self.transfers.loads
        assert self.worker.counters()["loads_in_flight"] == 0

    def arrive(self):
        base = [self.random.randrange(2)] * self.random.randrange(1, 40)
        request_id = f"r{self.random.randrange(12)}"
        if request_id in self.requests:
            return
        request = Run(
            request_id,
            base + [self.random.randrange(3) for _ in range(self.random.randrange(1, 20))],
            cache_salt=self.random.choice([None, None, "salt"]),
            max_tokens=self.random.randrange(1, 20),
        )
        self.requests[request_id] = request
        self.queue.append(request)
        self.side.arrived(request, self.session, self.now_s)

    def abort(self, request):
        if request.status == "finished":
            return
        loading = request.status == "remote"
        self.numbers["aborted_loads"] += loading
        self.finish(request, held=loading)

    def step(self):
        """Plan and run one step; take in the results of the oldest if enough are under way."""
        self.now_s += 1.0
        self.steps.append(self.execute(*self.schedule()))
        while len(self.steps) >= self.depth:
            self.update(*self.steps.popleft())

    # --- scheduler ------------------------------------------------------------------------------------------------

    def schedule(self):
        scheduled = {}
        budget = self.random.randrange(1, 50)
        for request in [*self.running]:
            if request not in self.running:
                continue
            # Results that are still under way decide the next token.
            new = min(budget, request.num_tokens - request.computed)
            if new <= 0 or not self.grow(request, request.computed + new, scheduled):
                continue
            scheduled[request.request_id] = new
            budget -= new
        for request in [*self.queue]:
            if budget <= 0 or self.preempted:
                break
            budget -= self.admit(request, budget, scheduled)
        self.unlock(scheduled)
        preempted, self.preempted = self.preempted, set()
        computed = []
        for request_id, new in scheduled.items():
            request = self.requests[request_id]
            computed.append((request_id, request.computed + new))
            self.learn(request, request.computed + new)
        step = Step(computed, lambda r: self.tables(self.requests[r]), preempted, idle=not scheduled)
        plan = self.side.plan(step, self.session)
        self.numbers["stores"] += len(plan.stores)
        self.numbers["loads"] += len(plan.loads)
        work = [(self.requests[r], self.requests[r].computed, new) for r, new in scheduled.items()]
        for request, _, new in work:
            request.computed += new
            request.in_flight += 1
        return encode(plan), work

    def grow(self, request, tokens, scheduled):
        """Give a running request blocks for *tokens*, taking them from others if need be."""
        self.retire(request)
        need = -(-tokens // BLOCK) - len(request.blocks)
        while need * (2 if self.window else 1) > len(self.pool.free):
            victim = self.running[-1]
            if victim.in_flight:
                return False
            scheduled.pop(victim.request_id, None)
            self.preempt(victim)
            if victim is request:
                return False
        self.extend(request, tokens)
        self.cache(request, tokens)
        return True

    def tables(self, request):
        return [request.blocks, request.window_blocks] if self.window else [request.blocks]

    def extend(self, request, tokens):
        """Give a request all the blocks for so many tokens; what lies before its window is none of them."""
        total = -(-tokens // BLOCK)
        request.blocks += self.pool.take(max(0, total - len(request.blocks)))
        if self.window:
            gone = max(0, request.settled - self.window + 1) // BLOCK
            request.window_blocks += [0] * (gone - len(request.window_blocks))
            request.window_blocks += self.pool.take(max(0, total - len(request.window_blocks)))

    def retire(self, request):
        """Take back the blocks before the window of what is known to be computed."""
        gone = max(0, request.settled - self.window + 1) // BLOCK if self.window else 0
        for place, block in enumerate(request.window_blocks[:gone]):
            if block:
                self.pool.drop([block])
                request.window_blocks[place] = 0

    def cache(self, request, tokens):
        if not self.window:
            self.pool.cache(request, tokens)

    def release(self, request):
        """Give all blocks back."""
        self.pool.drop(request.blocks)
        self.pool.drop(request.window_blocks)
        request.blocks, request.window_blocks, request.settled = [], [], 0

    def unlock(self, scheduled):
        """Where waiting requests hold all blocks (vLLM reserves some instead), take those of the last one."""
        holders = [r for r in self.queue if r.blocks and r.status == "waiting"]
        if holders and not scheduled and not self.running and not any(r.status == "remote" for r in self.queue):
            request = holders[-1]
            self.queue.remove(request)
            self.running.append(request)
            self.preempt(request)
            # To the end, or it would take the same blocks again.
            self.queue.append(self.queue.pop(0))

    def preempt(self, request):
        self.numbers["preempted"] += 1
        self.running.remove(request)
        self.release(request)
        request.computed, request.status = 0, "waiting"
        self.queue.insert(0, request)
        self.preempted.add(request.request_id)

    def admit(self, request, budget, scheduled):
        """Try to start a waiting request; returns the tokens of it that run in this step."""
        if request.status == "remote":
            return 0
        local, external = [], 0
        if not request.computed:
            local = [] if self.window else self.pool.hit(request)
            external, later = self.side.matched(request, len(local) * BLOCK, self.session, self.now_s)
            if external is None:
                return 0
            assert later == (external > 0)
            assert not (external and request.failed_before), "a request whose load failed is promised a hit again"
            request.computed = len(local) * BLOCK + external
            assert request.computed <= request.num_tokens
        new = 0 if external else min(budget, request.num_tokens - request.computed)
        for block in local:
            self.pool.share(block)
        request.settled = request.computed
        held = local or request.blocks
        need = -(-(request.computed + new) // BLOCK) - len(held)
        if need * (2 if self.window else 1) > len(self.pool.free):
            self.pool.drop(local)
            if not request.blocks:
                request.computed = request.settled = 0
            return 0
        request.blocks = held
        self.retire(request)
        self.extend(request, request.computed + new)
        self.side.allocated(request.request_id, self.tables(request), external)
        if external:
            request.status = "remote"
            return 0
        self.queue.remove(request)
        self.running.append(request)
        request.status = "running"
        self.cache(request, request.computed + new)
        scheduled[request.request_id] = new
        return new

    def finish(self, request, *, held):
        """End a request; its blocks go now, or when the workers say so."""
        for requests in (self.running, self.queue):
            if request in requests:
                requests.remove(request)
        request.status = "finished"
        delayed = self.side.finished(request.request_id)
        assert not (delayed and held), "released twice"
        if not delayed and not held:
            self.forget(request)

    def forget(self, request):
        self.release(request)
        del self.requests[request.request_id]

    def update(self, work, sent, loaded, bad, failed):
        """Take in a step's results, as vLLM does: bad blocks or failed requests, tokens, then transfers."""
        self.notice_failures(bad, failed)
        for request, _, new in work:
            request.in_flight -= 1
            request.settled += new
            if request.status != "running" or self.requests.get(request.request_id) is not request:
                continue
            if request.computed == request.num_tokens and new:
                request.output.append(self.random.randrange(3))
                if len(request.output) >= request.max_tokens:
                    self.finish(request, held=False)
        self.side.received(loaded, bad, failed)
        for request_id in loaded:
            self.arrive_loaded(self.requests[request_id])
        for request_id in sent:
            assert self.requests[request_id].status == "finished"
            self.forget(self.requests[request_id])

    def notice_failures(self, bad, failed):
        """A load that failed leaves what came before its first bad block; nothing, if only the request is named."""
        assert not (bad and self.window), "blocks of several groups cannot be told apart"
        for request in self.requests.values():
            places = [i for i, block in enumerate(request.blocks) if block in bad]
            if request.status == "remote" and (places or request.request_id in failed):
                request.computed, request.failed = places[0] * BLOCK if places else 0, True

    def arrive_loaded(self, request):
        if request.status == "finished":
            self.forget(request)
            return
        assert request.status == "remote"
        request.status = "waiting"
        self.numbers["failed"] += request.failed
        failed, request.failed = request.failed, False
        request.failed_before |= failed
        self.cache(request, request.computed)
        if failed and not request.computed:
            self.release(request)
        if request.computed == request.num_tokens:
            request.computed -= 1

    def learn(self, request, tokens):
        """Note what each chunk of a request must contain."""
        digests = chunk_keys().extend(request, b"", tokens)
        for chunk in range(len(digests) // 32):
            start = chunk * CHUNK
            for group in range(2 if self.window else 1):
                self.truth[group, digests[chunk * 32 : chunk * 32 + 32]] = [
                    [slot_value(request, start + b * BLOCK + t, group) for t in range(BLOCK)] for b in range(PER_CHUNK)
                ]

    # --- worker ---------------------------------------------------------------------------------------------------

    def execute(self, data, work):
        plan = decode(data, StepPlan)
        self.worker.preempt(plan)
        self.worker.begin(plan)
        for request, computed, new in work:
            self.forward(request, computed, new)
        self.worker.load(plan)
        self.worker.saved(ran=True)
        sent, loaded = self.worker.results(idle=False)
        return work, sent, loaded, self.worker.bad_blocks(), self.worker.failed_requests()

    def forward(self, request, computed, new):
        """Read all that was computed before, write what is new."""
        for group, table in enumerate(self.tables(request)):
            seen = max(0, computed - self.window + 1) if group else 0
            for position in range(seen, computed + new):
                value, block = slot_value(request, position, group), table[position // BLOCK]
                memory = self.pool.memory[block]
                if position >= computed:
                    self.no_reader_is_disturbed(block, position % BLOCK, value)
                    memory[position % BLOCK] = value
                assert memory[position % BLOCK] == value, "the model read a wrong value"

    def no_reader_is_disturbed(self, block, place, value):
        """A block that a store will read is not overwritten with something else."""
        if self.pool.memory[block][place] != value:
            reading = [
                b
                for job, done in self.transfers.stores
                for b in job.block_ids[done:].ravel().tolist()
                if job.ready.is_set()
            ]
            assert block not in reading, "a store reads a block that is being overwritten"

    def may_write(self, block, request_id):
        """A load writes only into blocks that are its request's alone."""
        request = self.requests[request_id]
        assert request.status in ("remote", "finished"), "a load writes after it was reported"
        assert block in request.blocks + request.window_blocks
        assert self.pool.references[block] == 1, "a load writes a block that is shared"
        assert block not in self.pool.cached.values(), "a load writes a block that others may hit"
