# SPDX-License-Identifier: Apache-2.0
"""A real vLLM on a GPU: one process stores through its ring, another one loads through its own, same tokens.

Needs an environment with vLLM for CUDA: name its interpreter in ``KVPOOL_TEST_VLLM_PYTHON``, or run the tests in it.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.harness import Engine, Server, connector, server, until

MAKER = Path(__file__).resolve().parents[1] / "engine" / "make_model.py"
CHUNK, BLOCK = 256, 32
TOKENS = 4 * CHUNK + BLOCK // 2
"""Both the engine's own cache and the server hold the same four chunks of it, so the same suffix is computed."""

STORED, LOADED = (f'kvpool_ring_bytes_total{{direction="{way}"}}' for way in ("store", "load"))
JOIN_S = 120.0


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    """Interpreter of an environment with vLLM for CUDA."""
    python = os.environ.get("KVPOOL_TEST_VLLM_PYTHON", sys.executable)
    asked = "import torch, vllm; assert torch.cuda.is_available(), 'its torch cannot use the device'"
    tried = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
    if tried.returncode:
        why = tried.stderr.strip().splitlines()[-1:]
        pytest.skip(f"no vLLM on this GPU with {python}: {''.join(why)}; name another KVPOOL_TEST_VLLM_PYTHON")
    return Path(python)


@pytest.fixture(scope="module")
def model(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "small"
    subprocess.run([vllm_python, MAKER, folder, "small"], check=True)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def start(
    request: pytest.FixtureRequest, vllm_python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Engine]:
    """Starts an engine with the server of that address."""

    def make(address: str) -> Engine:
        return Engine(
            vllm_python,
            tmp_path_factory.mktemp("engine"),
            model,
            workers=True,
            dtype="bfloat16",
            block_size=BLOCK,
            enforce_eager=request.param,
            kv_transfer_config=connector(address, modes=["ring", "streamed"]),
        )

    return make


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("server")) as running:
        yield running


def prompt(seed: object, tokens: int = TOKENS) -> list[int]:
    numbers = random.Random(f"{seed}")
    return [numbers.randrange(10, 2000) for _ in range(tokens)]


def counter(at: Server, name: str) -> float:
    return at.statistics().counters[name]


def wait_joined(engine: Engine, at: Server, who: str) -> None:
    """Store prompts of no other use until one goes through the ring: before it is joined they are streamed."""
    before, numbers = counter(at, STORED), iter(range(10_000))

    def through_the_ring() -> bool:
        engine.generate([prompt(f"join {who} {next(numbers)}", 2 * CHUNK + 1)], max_tokens=1)
        return counter(at, STORED) > before

    until(through_the_ring, JOIN_S, "the ring's first store")


def test_a_new_process_loads_through_its_ring_what_another_one_stored(
    start: Callable[[str], Engine], shared: Server
) -> None:
    made = prompt("shared")
    first = start(shared.address)
    try:
        wait_joined(first, shared, "first")
        before = counter(shared, STORED)
        cold = first.generate([made])
        until(lambda: counter(shared, STORED) > before, 30, "the store through the ring")
        # The same sums as after a load: the engine's own cache has the four chunks, the rest is computed.
        warm = first.generate([made])
    finally:
        first.close()

    second = start(shared.address)
    try:
        wait_joined(second, shared, "second")
        assert counter(shared, LOADED) == 0
        loaded = second.generate([made])
        until(lambda: counter(shared, LOADED) > 0, 30, "the load through the ring")
        other = second.generate([prompt("other")])
    finally:
        second.close()

    assert (cold["cached"], warm["cached"], loaded["cached"]) == ([0], [4 * CHUNK], [4 * CHUNK])
    assert loaded["tokens"] == warm["tokens"]
    assert len(set(warm["tokens"][0])) > 4, "a model that repeats itself cannot show an error"
    assert other["tokens"] != loaded["tokens"]
    assert counter(shared, "kvpool_checksum_mismatches_total") == 0
    assert counter(shared, 'kvpool_load_chunks_total{result="lost"}') == 0
