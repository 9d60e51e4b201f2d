# SPDX-License-Identifier: Apache-2.0
"""A transformer with a paged cache and CUDA graphs through the connector's worker half, a server and its mover."""

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from tests.fakes.clients import digests
from tests.fakes.server_process import ServerProcess
from tests.gpu.waiting import PATIENCE_S, until

from kvpool.client.link import Link
from kvpool.client.scheduler import SchedulerAdapter
from kvpool.config import ClientConfig
from kvpool.connector.halves import WorkerHalf
from kvpool.connector.plan import PlannedLoad, PlannedStore, StepPlan
from kvpool.connector.strategy import ParallelStrategy
from kvpool.connector.translate import EngineFacts, EngineGroup, registration
from kvpool.model.identity import ClientKind, GroupKind, Mode, Namespace

BLOCKS, CHUNK_TOKENS, BLOCK = 512, 64, 16
CHUNKS = 12
TOKENS = CHUNKS * CHUNK_TOKENS
PER_CHUNK = CHUNK_TOKENS // BLOCK
TABLE = CHUNKS * PER_CHUNK + 1


class Engine:
    """The model, and the connector's half that keeps its cache."""

    def __init__(self, server: ServerProcess, modes: tuple[Mode, ...]) -> None:
        from tests.gpu.tiny_transformer import LAYERS, TinyTransformer

        self.model = TinyTransformer(BLOCKS, TABLE)
        names = tuple(f"layers.{n}" for n in range(LAYERS))
        self.config = ClientConfig(server=server.address, modes=modes, ring_slot_bytes=1 << 20, ring_keep_bytes=0)
        self.worker = WorkerHalf(self.config, "node")
        facts = EngineFacts(
            namespace=Namespace(
                model="tiny", model_fingerprint="f", dtype="f32", kv_dtype="f32", layout="", hash_algorithm="test"
            ),
            hash_tokens=0,
            blocks=BLOCKS,
            groups=(EngineGroup(number=0, kind=GroupKind.FULL, window_tokens=0, block_tokens=BLOCK, layers=names),),
            strategy=ParallelStrategy(),
        )
        # Blocks are the second dimension of the tensors, as some engines have them: the connector gets them first.
        tensors = {name: cache.transpose(0, 1) for name, cache in self.model.caches.items()}
        self.worker.register(facts, tensors, dict.fromkeys(names, "p"))
        assert not self.worker.refusal, self.worker.refusal
        self.model.capture()
        self.link = Link(self.config, ClientKind.SCHEDULER)
        self.link.registration = registration(self.worker.facts, CHUNK_TOKENS, (0,), ())
        self.scheduler = SchedulerAdapter(self.link, self.config)

    def __enter__(self) -> Self:
        self.link.start()
        for link in (self.link, self.worker.attachment.link):
            assert link.wait_healthy(PATIENCE_S), link.state
        if Mode.RING in self.config.modes:
            until(lambda: not self.rings.reason, told=lambda: f"no ring: {self.rings.reason}")
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()
        self.link.close(1.0)

    @property
    def rings(self):
        return self.worker.attachment._ring.keeper

    def compute(self, request_id: str, tokens, blocks: np.ndarray, keys: bytes | None = None) -> None:
        """One step that computes a prompt, and stores it if it has digests."""
        import torch

        stores = ()
        if keys is not None:
            stored = blocks[: CHUNKS * PER_CHUNK].astype("<i8").tobytes()
            stores = (PlannedStore(request_id=request_id, first=0, parent=b"", digests=keys, blocks=stored),)
        plan = StepPlan(chunk_tokens=CHUNK_TOKENS, stores=stores)
        self.worker.preempt(plan)
        self.worker.begin(plan)
        self.model.prefill(tokens, torch.from_numpy(blocks).cuda())
        self.worker.load(plan)
        self.worker.saved(ran=True)

    def settle(self, request_id: str) -> None:
        """Wait until a request's stores are over, not only its reading."""
        ledger = self.worker._transfers._ledger
        until(
            lambda: self.worker.results(StepPlan()) and request_id not in ledger._stores,
            told=lambda: f"stores that are not over: {list(ledger._stores)}",
        )

    def fetch(self, request_id: str, keys: bytes, blocks: np.ndarray) -> set[int]:
        """Look a prompt up and load it into blocks; returns the bad ones."""
        self.scheduler.lookup(request_id, keys)
        answer = until(lambda: self.scheduler.answer(request_id), told=lambda: f"no answer; {self.link.state}")
        assert answer.chunks == CHUNKS
        load = PlannedLoad(
            request_id=request_id,
            lookup_id=answer.lookup_id,
            first=0,
            end=CHUNKS,
            blocks=blocks[: CHUNKS * PER_CHUNK].astype("<i8").tobytes(),
            skip_blocks=0,
        )
        self.worker.load(StepPlan(chunk_tokens=CHUNK_TOKENS, loads=(load,)))
        self.loaded(request_id)
        return self.worker.bad_blocks()

    def loaded(self, request_id: str) -> None:
        """Wait until its load is over."""
        link = self.worker.attachment.link
        until(lambda: request_id in self.worker.results(StepPlan())[1], told=lambda: f"no end of it; {link.state}")

    def decoded(self, blocks: np.ndarray):
        """Logits of one token behind the prompt."""
        import torch

        return self.model.decode(7, TOKENS, torch.from_numpy(blocks).cuda())


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        l1 = {"directory": memory, "allow_disk": False}
        folder = Path(tmp_path_factory.mktemp("server"))
        server = ServerProcess(folder, size_bytes=256 << 20, l1=l1)
        server.config["chunk_tokens"] = CHUNK_TOKENS
        with server:
            yield server


def prompt(seed: int):
    import torch

    return torch.randint(0, 512, (TOKENS,), generator=torch.Generator().manual_seed(seed)).cuda()


def blocks_from(first: int) -> np.ndarray:
    ids = np.arange(first, first + TABLE)
    return np.concatenate([np.random.default_rng(first).permutation(ids[:-1]), ids[-1:]]).astype(np.int64)


@pytest.mark.parametrize("mode", [Mode.RING, Mode.CLIENT_MOVED, Mode.STREAMED], ids=str)
def test_logits_after_a_load_are_those_of_recomputation(server: ServerProcess, mode: Mode) -> None:
    import torch

    tokens, keys = prompt(1), digests(CHUNKS, f"logits/{mode}")
    here, there, elsewhere = blocks_from(0), blocks_from(100), blocks_from(200)
    with Engine(server, (mode,)) as engine:
        assert engine.worker.attachment.link.state.mode is mode
        engine.compute("a", tokens, here, keys)
        wanted = engine.decoded(here)
        engine.settle("a")
        for cache in engine.model.caches.values():
            cache.fill_(1e4)

        assert engine.fetch("b", keys, there) == set()
        loaded = engine.decoded(there)
        for cache in engine.model.caches.values():
            cache.fill_(1e4)
        engine.compute("c", tokens, elsewhere)
        again = engine.decoded(elsewhere)

        assert torch.isfinite(wanted).all()
        assert torch.equal(loaded, wanted)
        assert torch.equal(loaded, again)


def test_graphs_are_captured_while_chunks_move(server: ServerProcess) -> None:
    import torch

    keys = [digests(CHUNKS, f"capture/{n}") for n in range(60)]
    here, there = blocks_from(0), blocks_from(100)
    with Engine(server, (Mode.RING, Mode.STREAMED)) as engine:
        engine.compute("first", prompt(2), here, keys[0])
        wanted = engine.decoded(here)
        engine.settle("first")
        stored = here[: CHUNKS * PER_CHUNK].astype("<i8").tobytes()
        failed: list[BaseException] = []

        def move() -> None:
            try:
                for number in range(1, 60):
                    name = f"r{number}"
                    store = PlannedStore(request_id=name, first=0, parent=b"", digests=keys[number], blocks=stored)
                    engine.worker.begin(StepPlan(chunk_tokens=CHUNK_TOKENS, stores=(store,)))
                    for job in engine.worker._side._ready:
                        job.ready.set()
                    engine.worker._side._ready = []
                    assert engine.fetch(f"l{number}", keys[0], there) == set()
                    engine.settle(name)
            except BaseException as e:  # noqa: BLE001 - the test reports it
                failed.append(e)

        thread = threading.Thread(target=move)
        thread.start()
        captures = 0
        while thread.is_alive() and captures < 200:
            engine.model.capture()
            assert torch.equal(engine.decoded(here), wanted)
            captures += 1
        thread.join(PATIENCE_S)

        assert not thread.is_alive(), f"it still moves after {captures} captures"
        assert not failed, failed
        assert captures > 3


def test_blocks_that_are_taken_away_are_never_stored_with_other_bytes(server: ServerProcess) -> None:
    import torch

    here, there = blocks_from(0), blocks_from(100)
    with Engine(server, (Mode.RING, Mode.STREAMED)) as engine:
        torch.cuda.synchronize()
        for number in range(40):
            name, keys = f"p{number}", digests(CHUNKS, f"preempted/{number}")
            engine.compute(name, prompt(number), here, keys)
            taken = {n: c[:, torch.from_numpy(here[:-1]).cuda()].clone() for n, c in engine.model.caches.items()}
            # The next step preempts the request and writes its blocks at once.
            engine.worker.preempt(StepPlan(preempted=(name,)))
            for cache in engine.model.caches.values():
                cache[:, torch.from_numpy(here).cuda()] = float(number)
            engine.settle(name)
            engine.scheduler.lookup(f"l{number}", keys)
            answer = until(lambda n=number: engine.scheduler.answer(f"l{n}"), told=lambda: engine.link.state)
            if not answer.chunks:
                continue
            blocks = there[: answer.chunks * PER_CHUNK]
            load = PlannedLoad(
                request_id=f"l{number}",
                lookup_id=answer.lookup_id,
                first=0,
                end=answer.chunks,
                blocks=blocks.astype("<i8").tobytes(),
                skip_blocks=0,
            )
            engine.worker.load(StepPlan(chunk_tokens=CHUNK_TOKENS, loads=(load,)))
            engine.loaded(f"l{number}")
            assert engine.worker.bad_blocks() == set()
            for name_of, cache in engine.model.caches.items():
                assert torch.equal(cache[:, torch.from_numpy(blocks).cuda()], taken[name_of][:, : len(blocks)])
