# SPDX-License-Identifier: Apache-2.0
"""vLLM's HTTP server, with its scheduler and worker in processes of their own, as in production."""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

import pytest
from tests.engine.harness import HttpEngine, connector, server

from kvpool.cli.engine import metrics_of, view_of

log = logging.getLogger("kvpool.tests")

TIMES_SOONER = 5
"""How much sooner the first token of a loaded prompt comes than of a computed one, at least."""


def ask(engine: HttpEngine, ids: list[int], max_tokens: int) -> tuple[list[int], int, float]:
    """Return the tokens, how many of the prompt were cached, and the seconds it took."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    started = perf_counter()
    answer = engine.post("/v1/completions", body | {"return_token_ids": True})
    seconds = perf_counter() - started
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0, seconds


def chat(engine: HttpEngine, text: str) -> tuple[list[int], int]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0}
    answer = engine.post("/v1/chat/completions", body | {"return_token_ids": True, "ignore_eos": True})
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0


@contextmanager
def both(python: Path, folder: Path, model: Path, transfer: dict) -> Iterator[tuple[HttpEngine, HttpEngine]]:
    """Two engines, started together from nothing; they share the server alone."""
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            made.append(HttpEngine(python, folder, model, transfer))
            stack.callback(made[-1].close)
        yield made[0].ready(), made[1].ready()


@pytest.mark.behaviour("R024")
def test_a_new_server_process_loads_and_its_first_token_comes_sooner(
    engine_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
    large_model: Path,
    record_property: Callable[[str, object], None],
) -> None:
    folder = tmp_path_factory.mktemp("h")
    numbers = random.Random(7)
    prompts = [[numbers.randrange(10, 4000) for _ in range(2064)] for _ in range(3)]
    text = "the quick brown fox jumps over the lazy dog, one two three. " * 30
    with (
        server(folder) as cache,
        both(engine_python, folder, large_model, connector(cache.address)) as (engine, other),
    ):
        ask(engine, prompts[0][40::-1], 1)
        cold = [ask(engine, p, 1) for p in prompts]
        warm = [ask(engine, p, 1) for p in prompts]
        said = chat(engine, text)
        longer = ask(engine, prompts[0], 8)[0]
        cache.wait_chunks(3 * 8 + 1)
        assert engine.metric("vllm:kvpool_stored_chunks_total") >= 3 * 8
        engine.close()

        ask(other, prompts[0][40::-1], 1)
        loaded = [ask(other, p, 1) for p in prompts]
        again = chat(other, text)
        assert ask(other, prompts[0], 8)[0] == longer
        assert other.metric("vllm:kvpool_loads_total") == 4
        seen = view_of(metrics_of(other.url))
        assert [(s["server"], s["state"]) for s in seen.servers] == [(cache.address, "up")]
        assert (seen.uncached, seen.numbers["loads"]) == ((), 4)
        assert other.metric("vllm:kvpool_failed_loads_total") == 0
        assert other.metric("vllm:kvpool_uncached") == 0
        assert other.metric("vllm:external_prefix_cache_hits_total") >= 3 * 2048

    assert [a[1] for a in cold] == [0, 0, 0]
    assert [a[1] for a in warm] == [2048, 2048, 2048]
    assert [a[1] for a in loaded] == [2048, 2048, 2048]
    assert [a[0] for a in loaded] == [a[0] for a in cold]
    assert (said[1], again[1] > 0, again[0]) == (0, True, said[0])
    seconds = {
        name: min(a[2] for a in answers) for name, answers in (("cold", cold), ("warm", warm), ("loaded", loaded))
    }
    log.info("first token after %s s", {name: round(value, 3) for name, value in seconds.items()})
    assert seconds["loaded"] * TIMES_SOONER <= seconds["cold"], seconds
