# SPDX-License-Identifier: Apache-2.0
"""Engines of other shapes: replicas, ranks that hold the same, quantised caches, no prefix cache."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.conftest import model
from tests.engine.harness import Server, connector, engine, http_engine, server, until

FAILED, STORED = "vllm:kvpool_failed_loads", "vllm:kvpool_stored_chunks"
RANKS = {"threads": "0|1"}


def prompt(seed: object, tokens: int = 1100) -> list[int]:
    numbers = random.Random(f"shapes {seed}")
    return [numbers.randrange(10, 2000) for _ in range(tokens)]


def wait_clients(at: Server, count: int) -> None:
    until(lambda: at.statistics().clients >= count, 60, f"{count} clients")


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
        wait_clients(cache, 3)
        cold = running.generate([made], max_tokens=40)
        cache.wait_chunks(3)
        cache.wait_no_leases()
        running.reset()
        loaded = running.generate([made], max_tokens=40)
        counted = running.metrics()

    assert (cold["cached"], loaded["cached"]) == ([0], [768])
    assert cold["tokens"] == loaded["tokens"]
    assert counted[FAILED] == 0


def test_drafts_by_ngram_store_what_was_accepted(
    engine_python: Path, tmp_path: Path, small_model: Path, cache: Server
) -> None:
    """Rejected drafts were in the blocks for a step; what is stored of generated tokens must be without them.

    Long, until the model repeats itself here and there: before that no draft is right.
    """
    made = prompt("drafts", 300) * 2
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    transfer = connector(cache.address, store_generated=True)
    options = {"kv_transfer_config": transfer, "speculative_config": drafts}
    with (
        engine(engine_python, tmp_path, small_model) as plain,
        engine(engine_python, tmp_path, small_model, **options) as running,
    ):
        wait_clients(cache, 3)
        right = plain.generate([made], max_tokens=500)["tokens"][0]
        cold = running.generate([made], max_tokens=500)
        running.reset()
        cache.wait_chunks(4)
        longer = made + right[:440]
        loaded = running.generate([longer], max_tokens=40)
        expected = plain.generate([longer], max_tokens=40)["tokens"]
        counted = running.metrics()

    proposed, accepted = counted["vllm:spec_decode_num_draft_tokens"], counted["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted < proposed, "drafts of both kinds"
    assert cold["tokens"] == [right]
    assert (cold["cached"], loaded["cached"]) == ([0], [1024])
    assert loaded["tokens"] == expected
    assert counted[FAILED] == 0
    assert counted['vllm:kvpool_uncached{half="scheduler",reason="unsupported"}'] == 0


def test_another_image_with_the_same_tokens_never_hits(engine_python: Path, tmp_path: Path, cache: Server) -> None:
    """What stands for an image in a prompt are the same tokens for every image."""
    made = prompt("image", 1040)
    options = {"kv_transfer_config": connector(cache.address), "limit_mm_per_prompt": {"image": 1}}
    with engine(engine_python, tmp_path, model(engine_python, "image"), **options) as first:
        wait_clients(cache, 3)
        cold = [first.generate([made], image=number) for number in (1, 2)]
        cache.wait_chunks(8)
        cache.wait_no_leases()
    with engine(engine_python, tmp_path, model(engine_python, "image"), **options) as second:
        wait_clients(cache, 3)
        other = second.generate([made], image=3)
        loaded = [second.generate([made], image=number) for number in (1, 2)]
        second.reset()
        text = second.generate([made])
        counted = second.metrics()

    assert [answer["cached"] for answer in (*cold, other, text)] == [[0]] * 4
    assert [answer["cached"] for answer in loaded] == [[1024]] * 2
    assert [answer["tokens"] for answer in loaded] == [answer["tokens"] for answer in cold]
    assert len({tuple(answer["tokens"][0]) for answer in (*cold, other, text)}) == 4, "each image changes the answer"
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
