# SPDX-License-Identifier: Apache-2.0
"""An engine that the peer's server serves: its cache on a device, reached through the peer's own adapters.

Importable only where the peer is (tools/peer_gpu.py); ``tests/bench/peer_gpu.py`` is what to run.
"""

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
import zmq
from lmcache.integration.vllm import vllm_multi_process_adapter as peer
from tests.bench.peer_gpu_compare import WrongBytes

from kvpool.cli.bench.gpu_engine import freeze_garbage
from kvpool.cli.errors import Failure

BLOCK_TOKENS, CHUNK_TOKENS, LAYERS, HEAD_SIZE = 16, 256, 32, 128
ELEMENT = 2  # float16
VOCABULARY = 128_000
POISON = 0xA5
WAIT_S, KEPT_S, ALIVE_EVERY_S = 60.0, 10.0, 0.5
POLL_S = 0.00005
DEPTH = 2
PAUSE = threading.Event()


class Shape(NamedTuple):
    """How the cache of one engine lies."""

    run: int
    """Bytes of one block in one plane."""

    tokens: int
    """Tokens of one job; the cache holds two of them."""

    heads_first: bool = False
    """Within a block the heads come before the tokens: the layout that the peer moves with kernels."""

    @property
    def label(self) -> str:
        return f"{self.run // 1024}KiB" + ("-hnd" if self.heads_first else "")

    @property
    def chunk_bytes(self) -> int:
        return 2 * LAYERS * (CHUNK_TOKENS // BLOCK_TOKENS) * self.run

    def viewed(self, pages: int) -> tuple[int, ...]:
        """Return the shape of one layer's tensor, keys and values together."""
        heads = self.run // (BLOCK_TOKENS * HEAD_SIZE * ELEMENT)
        inner = (heads, BLOCK_TOKENS) if self.heads_first else (BLOCK_TOKENS, heads)
        return (2, pages, *inner, HEAD_SIZE)


class Prompt(NamedTuple):
    """Tokens that no prompt before began with, so that none of its chunks is known."""

    tokens: list[int]
    stored: object
    loaded: object


class Engine:
    """A scheduler and a worker of one rank; a context manager. One thread."""

    def __init__(self, url: str, shape: Shape, device: str, alive: Callable[[], None]) -> None:
        """Fill the cache with random bytes and let the server have it.

        Args:
            url: where the peer's server listens.
            shape: the cache's.
            device: cuda or, to try the way without numbers, cpu.
            alive: raises when the server has ended.
        """
        self.shape, self._url, self._device, self._alive = shape, url, device, alive
        self._count = itertools.count(1)
        self.pages = 2 * shape.tokens // BLOCK_TOKENS
        made = torch.Generator(device=device).manual_seed(shape.run)
        size = (2, self.pages, shape.run)
        self.layers = [
            torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=made) for _ in range(LAYERS)
        ]
        blocks = random.Random(shape.run)
        halves = [*range(self.pages // 2)], [*range(self.pages // 2, self.pages)]
        for half in halves:
            blocks.shuffle(half)
        self.sources, self.targets = halves
        self._base = blocks.choices(range(VOCABULARY), k=shape.tokens)
        self._connect()

    def _connect(self) -> None:
        ranks = peer.ParallelStrategy(
            mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
        )
        context, model = zmq.Context(), f"bench-{self.shape.label}"
        kwargs = {"mq_timeout": WAIT_S}
        self.scheduler = peer.LMCacheMPSchedulerAdapter([self._url], context, model, BLOCK_TOKENS, ranks, **kwargs)
        self.worker = peer.LMCacheMPWorkerAdapter(self._url, context, model, BLOCK_TOKENS, ranks, **kwargs)
        viewed = self.shape.viewed(self.pages)
        caches = {f"layer.{n}": layer.view(torch.float16).view(viewed) for n, layer in enumerate(self.layers)}
        hints = {"kv_layout": "HND" if self.shape.heads_first else "NHD"}
        self.synchronize()
        self.worker.register_kv_caches(caches, layout_hints=hints)
        self._begun: set[str] = set()
        self._done: list[str] = []

    def __enter__(self) -> Self:
        freeze_garbage()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # else its server may not answer, and each goodbye would wait for a minute
            self.worker.shutdown()
            self.scheduler.shutdown()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def prompt(self, tokens: int = 0) -> Prompt:
        """Return a prompt that was not seen before, of all the cache's tokens unless told."""
        tokens = tokens or self.shape.tokens
        mine, blocks = [VOCABULARY + next(self._count), *self._base[1:tokens]], tokens // BLOCK_TOKENS

        def whole(ids: list[int]) -> object:
            return peer.LoadStoreOp(token_ids=mine, block_ids=[ids[:blocks]], start=0, end=tokens)

        return Prompt(mine, whole(self.sources), whole(self.targets))

    def store(self, prompt: Prompt) -> None:
        """Begin a store of the sources."""
        name = self._name("store")
        self._begun.add(name)
        self.worker.submit_store_request(name, prompt.stored, self.worker.create_recorded_event())

    def load(self, prompt: Prompt) -> float:
        """Look up, then begin a load into the targets; returns when that was."""
        name = self._name("load")
        if (found := self.lookup(name, prompt)) != len(prompt.tokens):
            raise Failure(f"the peer found {found} of {len(prompt.tokens)} tokens that it had")
        began_s = time.monotonic()
        self.worker.submit_retrieve_request(name, prompt.loaded, self.worker.create_recorded_event())
        return began_s

    def ended(self) -> tuple[int, int]:
        """Wait until something ended, by the completion events; returns how many stores and how many loads."""
        begun, self._begun = self._begun, set()

        def finished() -> tuple[int, int] | None:
            nonlocal begun
            stored, loaded = self.worker.get_finished(begun)
            begun = set()
            stored, loaded = stored or set(), loaded or set()
            if not self.worker.is_healthy:
                raise Failure("the peer's worker adapter calls its server unhealthy")
            if failed := self.worker.get_failed_request_ids():
                raise Failure(f"loads of the peer failed: {sorted(failed)}")
            self._done += [*stored, *loaded]
            return (len(stored), len(loaded)) if stored or loaded else None

        return self._until(finished, "a store or a load", WAIT_S)

    def lookup(self, name: str, prompt: Prompt) -> int:
        """Return how many tokens are found and locked, when that is known."""
        self.scheduler.maybe_submit_lookup_request(name, prompt.tokens)
        return self._until(lambda: self.scheduler.check_lookup_result(name), "a lookup", WAIT_S)

    def found(self, prompt: Prompt) -> tuple[int, float]:
        """Return how many tokens are found and after how many milliseconds; nothing stays locked."""
        name = self._name("lookup")
        began_s = time.perf_counter()
        found = self.lookup(name, prompt)
        took_s = time.perf_counter() - began_s
        self.scheduler.free_lookup_locks(prompt.tokens, 0, len(prompt.tokens), name)
        self._forget(name)
        self.scheduler.req_clients[self._url].ping(None).result(timeout=WAIT_S)  # what was freed is done
        return found, 1e3 * took_s

    def checked(self, tokens: int = 0) -> Prompt:
        """Store the sources, load them into poisoned targets, compare all bytes; returns what is stored by now.

        Raises:
            WrongBytes: they differ.
        """
        prompt = self.prompt(tokens)
        self.store(prompt)
        self.ended()
        self.kept([prompt])
        self.verified(prompt)
        return prompt

    def verified(self, prompt: Prompt) -> int:
        """Load into poisoned targets, compare all bytes; returns how many.

        Raises:
            WrongBytes: they differ.
        """
        self.poison()
        self.load(prompt)
        self.ended()
        self.settle()
        return self.same(prompt)

    def poison(self) -> None:
        """Overwrite all targets."""
        for layer in self.layers:
            layer[:, self.pages // 2 :] = POISON
        self.synchronize()

    def same(self, prompt: Prompt) -> int:
        """Compare the targets with their sources; returns how many bytes.

        Raises:
            WrongBytes: they differ.
        """
        blocks = len(prompt.tokens) // BLOCK_TOKENS
        sources, targets = (
            torch.tensor(ids[:blocks], device=self.layers[0].device) for ids in (self.sources, self.targets)
        )
        if not all(torch.equal(layer[:, sources], layer[:, targets]) for layer in self.layers):
            raise WrongBytes("WRONG BYTES came back from the peer; no number counts")
        return self.bytes_of(prompt)

    def bytes_of(self, prompt: Prompt) -> int:
        """Return how many bytes a prompt's chunks are."""
        return self.shape.chunk_bytes * (len(prompt.tokens) // CHUNK_TOKENS)

    def kept(self, prompts: Sequence[Prompt]) -> None:
        """Make sure that stores are there: the peer answers "stored" also where it found no memory."""
        for prompt in prompts:
            whole = len(prompt.tokens)
            self._until(lambda p=prompt, n=whole: self.found(p)[0] == n, "what the peer said to have stored", KEPT_S)

    def emptied(self, prompts: Sequence[Prompt]) -> None:
        """Let the server drop everything, so that its next stores find memory; *prompts* are gone then."""

        def gone() -> bool:
            return bool(self.scheduler.reset_cache()) and not any(self.found(p)[0] for p in prompts)

        self._until(gone, "emptying the peer's server", KEPT_S)

    def settle(self) -> None:
        """End all requests that are over; outside of what is timed."""
        done, self._done = self._done, []
        for name in done:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self.scheduler.end_session(name)
        self.scheduler.cleanup_lookup_result(name)

    def _name(self, kind: str) -> str:
        """Return a request id that there was not yet: the peer's server keeps requests by this alone."""
        return f"{self.shape.label}-{kind}-{next(self._count)}"

    def _until(self, condition: Callable[[], object], what: str, seconds: float) -> "int | tuple[int, int] | object":
        ends_s = time.monotonic() + seconds
        alive_s = 0.0
        while (value := condition()) is None or value is False:
            now_s = time.monotonic()
            if now_s > ends_s:
                raise Failure(f"{what} did not end within {seconds:g} s")
            if now_s > alive_s:
                self._alive()
                alive_s = now_s + ALIVE_EVERY_S
            PAUSE.wait(POLL_S)
        return value


class Span(NamedTuple):
    """What moved between two times."""

    bytes_moved: int
    began_s: float
    ended_s: float


def span(engine: Engine, known: Prompt, fresh: Sequence[Prompt], ways: tuple[bool, bool], seconds: float) -> Span:
    """Keep stores and loads under way, each with the next one asked for already, to the end of what was begun.

    Stores go on until *fresh* is used up, loads beside them as long; loads alone for *seconds*.
    """
    waiting = deque(fresh)
    began_s = time.monotonic()
    ends_s, moved, running = began_s + seconds, 0, 0
    size = engine.bytes_of(known)

    def go_on() -> bool:
        return bool(waiting) if ways[0] else time.monotonic() < ends_s

    def begin(is_load: bool) -> None:
        if is_load:
            engine.load(known)
        else:
            engine.store(waiting.popleft())

    for is_load in [n for n, wanted in enumerate(ways) if wanted] * DEPTH:
        begin(bool(is_load))
        running += 1
    while running:
        stored, loaded = engine.ended()
        for is_load in [False] * stored + [True] * loaded:
            moved += size
            if go_on():
                begin(is_load)
            else:
                running -= 1
    return Span(moved, began_s, time.monotonic())


def flow(engine: Engine, ways: tuple[bool, bool], seconds: float, stores: int) -> tuple[list[Span], int]:
    """Move for some time in all; returns the spans and how many bytes were compared.

    Stores are only begun while there is room, *stores* of them in a span: the peer does not evict to make room. What a
    span loaded is compared, and the last that it stored.
    """
    spans: list[Span] = []
    compared = 0
    while sum(s.ended_s - s.began_s for s in spans) < seconds:
        known = engine.checked()
        fresh = [engine.prompt() for _ in range(stores if ways[0] else 0)]
        engine.poison()
        spans.append(span(engine, known, fresh, ways, seconds))
        engine.settle()
        if ways[1]:
            compared += engine.same(known)
        if fresh:
            engine.kept(fresh)
            compared += engine.verified(fresh[-1])
        engine.emptied([known, *fresh])
    return spans, compared


def one_at_a_time(engine: Engine, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Return GB/s of single requests by way, from the call to the completion, and the bytes compared."""
    rates: dict[str, list[float]] = {"store": [], "load": []}
    used = [engine.checked()]
    size, compared = engine.bytes_of(used[0]), 0
    for _ in range(rounds):
        fresh = engine.prompt()
        began_s = time.monotonic()
        engine.store(fresh)
        engine.ended()
        rates["store"].append(size / (time.monotonic() - began_s) / 1e9)
        engine.kept([fresh])
        engine.poison()
        began_s = engine.load(fresh)
        engine.ended()
        rates["load"].append(size / (time.monotonic() - began_s) / 1e9)
        engine.settle()
        compared += engine.same(fresh)
        used.append(fresh)
    engine.emptied(used)
    return rates, compared


def lookups(engine: Engine, rounds: int) -> tuple[list[float], int]:
    """Return milliseconds of lookups of all the cache's tokens, all found, and the bytes compared."""
    known = engine.checked()
    samples = []
    for _ in range(rounds):
        found, took_ms = engine.found(known)
        if found != len(known.tokens):
            raise Failure(f"the peer found {found} of {len(known.tokens)} tokens that it had")
        samples.append(took_ms)
    engine.emptied([known])
    return samples, engine.bytes_of(known)
