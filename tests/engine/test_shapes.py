# SPDX-License-Identifier: Apache-2.0
"""Engines of other shapes: replicas, ranks that hold the same, quantised caches, no prefix cache."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.conftest import model
from tests.engine.harness import Server, connector, engine, http_engine, server, until

FAILED, STORED = "vllm:kvpool_failed_loads", "vllm:kvpool_stored_chunks"
RANKS = {"workers": True, "threads": "0|1"}


def prompt(seed: object, tokens: int = 1100) -> list[int]:
    numbers = random.Random(f"shapes {seed}")
    return [numbers.randrange(10, 2000) for _ in range(tokens)]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Server]:
    with server(tmp_path) as running:
        yield running


def test_replicas_share_what_they_store(engine_python: Path, tmp_path: Path, small_model: Path, cache: Server) -> None:
    made = prompt("replicas")
    options = {"data-parallel-size": 2, "threads": "0|1"}
    with http_engine(engine_python, tmp_path, small_model, connector(cache.address), **options) as running:
        until(lambda: cache.statistics().clients >= 5, 60, "a rank and a scheduler for each replica, the probe")
        cold = running.complete(made, replica=0)
        cache.wait_chunks(4)
        loaded = running.complete(made, replica=1)

    assert (cold["cached"], loaded["cached"]) == (0, 1024)
    assert cold["tokens"] == loaded["tokens"]


@pytest.mark.behaviour("R119", "D068", "D072")
def test_ranks_that_hold_the_same_store_once_and_all_load(engine_python: Path, tmp_path: Path, cache: Server) -> None:
    """Latent attention. A hit is compared with the engine's own hit of the same length, see docs/engines.md."""
    made = prompt("latent", 1040)
    transfer = connector(cache.address)
    with engine(
        engine_python,
        tmp_path,
        model(engine_python, "latent"),
        dtype="bfloat16",
        tensor_parallel_size=2,
        kv_transfer_config=transfer,
        **RANKS,
    ) as running:
        until(lambda: cache.statistics().clients >= 4, 60, "two ranks, the scheduler, the probe")
        running.generate([made])
        cache.wait_chunks(4)
        cache.wait_no_leases()
        own = running.generate([made])
        running.reset()
        loaded = running.generate([made])
        counted = running.metrics()

    assert (own["cached"], loaded["cached"]) == ([1024], [1024])
    assert own["tokens"] == loaded["tokens"]
    assert (counted[STORED], counted[FAILED]) == (4, 0)
    assert cache.statistics().chunks == 4


def test_a_quantised_cache(engine_python: Path, tmp_path: Path, small_model: Path, cache: Server) -> None:
    transfer = connector(cache.address)
    made = prompt("quantised", 1000)
    with engine(engine_python, tmp_path, small_model, kv_cache_dtype="fp8", kv_transfer_config=transfer) as running:
        until(lambda: cache.statistics().clients >= 3, 60, "its clients")
        cold = running.generate([made], max_tokens=40)
        cache.wait_chunks(3)
        cache.wait_no_leases()
        running.reset()
        loaded = running.generate([made], max_tokens=40)
        counted = running.metrics()

    assert (cold["cached"], loaded["cached"]) == ([0], [768])
    assert cold["tokens"] == loaded["tokens"]
    assert counted[FAILED] == 0


def test_an_engine_without_its_prefix_cache_runs_uncached_and_says_so(
    engine_python: Path, tmp_path: Path, small_model: Path, cache: Server
) -> None:
    made = prompt("off", 600)
    transfer = connector(cache.address)
    with engine(
        engine_python, tmp_path, small_model, enable_prefix_caching=False, kv_transfer_config=transfer
    ) as running:
        tokens = [running.generate([made])["tokens"] for _ in range(2)]
        counted, log = running.metrics(), running.log()

    assert tokens[0] == tokens[1]
    assert cache.statistics().chunks == 0
    assert "runs uncached: prefix caching is switched off" in log
    assert counted['vllm:kvpool_uncached{half="scheduler",reason="unsupported"}'] == 1
