# SPDX-License-Identifier: Apache-2.0
"""What the engine's own interfaces show of the cache: requests, resets, adapters, events, metrics."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from tests.engine.conftest import model
from tests.engine.harness import HttpEngine, Server, connector, http_engine, server, until


def prompt(seed: object, tokens: int = 1100) -> list[int]:
    numbers = random.Random(f"interfaces {seed}")
    return [numbers.randrange(10, 2000) for _ in range(tokens)]


class Listener:
    """A router's ear: the engine's cache events, as they are published."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self.sequences: list[int] = []
        self.engine: set[int] = set()
        """Hashes that the engine ever said to hold itself."""

        self.cache: set[int] = set()
        """Hashes that the server holds, as far as was told."""

        self.block_sizes: set[int] = set()

    def listen(self) -> "Listener":
        while self._socket.poll(50):
            _, sequence, payload = self._socket.recv_multipart()
            self.sequences.append(int.from_bytes(sequence))
            for event in msgspec.msgpack.decode(payload)[1]:
                self._hear(event)
        return self

    def _hear(self, event: dict) -> None:
        hashes = set(event.get("block_hashes", ()))
        if event["type"] == "BlockStored" and event["medium"] == "CPU":
            self.cache |= hashes
            self.block_sizes.add(event["block_size"])
        elif event["type"] == "BlockStored":
            self.engine |= hashes
        elif event["type"] == "BlockRemoved" and event["medium"] == "CPU":
            self.cache -= hashes

    def close(self) -> None:
        self._socket.close(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("i")


@pytest.fixture(scope="module")
def cache(folder: Path) -> Iterator[Server]:
    with server(folder) as running:
        yield running


@pytest.fixture(scope="module")
def listener(folder: Path) -> Iterator[Listener]:
    """Listens from the engine's start on: what is published before somebody listens is not published again."""
    made = Listener(f"ipc://{folder}/events.sock")
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(
    engine_python: Path, folder: Path, small_model: Path, cache: Server, listener: Listener
) -> Iterator[HttpEngine]:
    del listener
    adapters = [f"{name}={model(engine_python, f'adapter-{name}')}" for name in ("a", "b")]
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder}/events.sock"}
    options = {"enable-lora": True, "max-lora-rank": 8, "lora-modules": adapters}
    options |= {"kv-events-config": json.dumps(events)}
    with http_engine(engine_python, folder, small_model, connector(cache.address), **options) as running:
        until(lambda: cache.statistics().clients >= 3, 60, "its clients")
        yield running


def settled(cache: Server) -> int:
    """Wait until no store is under way; returns the chunks that are kept."""
    cache.wait_no_leases()
    return cache.statistics().chunks


def test_a_request_may_opt_out_and_is_told_what_was_loaded(engine: HttpEngine, cache: Server) -> None:
    made = prompt("opt out")
    before = settled(cache)

    unseen = engine.complete(made, kv_transfer_params={"kvpool": {"store": False}})
    assert (settled(cache), unseen["cached"]) == (before, 0)
    engine.post("/reset_prefix_cache")
    stored = engine.complete(made)
    cache.wait_chunks(before + 4)
    engine.post("/reset_prefix_cache")
    alone = engine.complete(made, kv_transfer_params={"kvpool": {"load": False}})
    engine.post("/reset_prefix_cache")
    some = engine.complete(made, kv_transfer_params={"kvpool": {"max_load_tokens": 600}})

    assert [answer["cached"] for answer in (stored, alone, some)] == [0, 0, 512]
    assert unseen["tokens"] == stored["tokens"] == alone["tokens"] == some["tokens"]
    told = [answer["answer"].get("kv_transfer_params") for answer in (stored, alone, some)]
    assert told == [None, {"kvpool": {"loaded_tokens": 0}}, {"kvpool": {"loaded_tokens": 512}}]


def test_a_reset_of_the_external_cache_empties_the_server(engine: HttpEngine, cache: Server) -> None:
    made = prompt("reset")
    first = engine.complete(made)
    cache.wait_chunks(4)
    settled(cache)

    engine.post("/reset_prefix_cache?reset_external=true")

    assert cache.statistics().chunks == 0
    again = engine.complete(made)
    assert (again["cached"], again["tokens"]) == (0, first["tokens"])
    cache.wait_chunks(4)


@pytest.mark.behaviour("D017")
def test_adapters_have_chunks_of_their_own(engine: HttpEngine, cache: Server) -> None:
    made = prompt("adapters")
    before = settled(cache)
    cold = [engine.complete(made, model=name) for name in ("tiny", "a", "b")]
    cache.wait_chunks(before + 12)
    engine.post("/reset_prefix_cache")
    loaded = [engine.complete(made, model=name) for name in ("tiny", "a", "b")]

    assert [answer["cached"] for answer in cold + loaded] == [0] * 3 + [1024] * 3
    assert [answer["tokens"] for answer in loaded] == [answer["tokens"] for answer in cold]
    assert len({tuple(answer["tokens"]) for answer in cold}) == 3


@pytest.mark.behaviour("D122")
def test_events_tell_what_the_server_keeps(engine: HttpEngine, cache: Server, listener: Listener) -> None:
    def steps() -> Listener:
        """Events are told along with steps."""
        engine.complete(prompt("tick", 20), 1)
        return listener.listen()

    until(lambda: len(steps().cache) == settled(cache), 30, "a snapshot of what was there")
    engine.complete(prompt("events"))
    until(lambda: len(steps().cache) == settled(cache) and len(listener.cache) >= 4, 30, "what was stored")

    assert listener.block_sizes == {256}
    assert len(listener.cache & listener.engine) >= 4, "a chunk's name is the engine's own hash of its last block"
    assert listener.sequences == [*range(listener.sequences[0], listener.sequences[-1] + 1)]
    engine.post("/reset_prefix_cache?reset_external=true")
    until(lambda: not steps().cache, 30, "what was removed")
    assert cache.statistics().chunks == 0


def test_every_series_is_on_the_engines_page_from_the_start(engine: HttpEngine, cache: Server) -> None:
    page = engine.get("/metrics")

    for name in ("lookups", "lookup_hits", "loads", "loads_not_worth", "stores", "failed_loads", "stored_bytes"):
        assert f"vllm:kvpool_{name}_total{{" in page, name
    assert engine.metric("vllm:kvpool_connector_faults_total") == 0
    assert engine.metric("vllm:kvpool_uncached") == 0
    engine.complete(prompt("state", 20), 1)
    up = f'server="{cache.address}",state="up"'
    until(lambda: up in engine.get("/metrics"), 30, "a step that tells how the server stands")
