# SPDX-License-Identifier: Apache-2.0
"""First act of the demo: a real server, real vLLM engines on CPU, and what a shared prefix saves.

1. An engine computes a long prompt (cold), then answers the same prompt from its own memory (warm), and ends.
2. A new engine process, which computed nothing, answers it from what the first one left in the server (loaded).

All must give the same tokens. Everything started is ended and removed on every path.
"""

import contextlib
import json
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tests.engine.conftest import model
from tests.engine.harness import Engine, connector, engine
from tools import vllm_env
from tools.demo_act import say
from tools.demo_picture import draw

from kvpool.cli.bench.own_server import OwnServer
from kvpool.cli.connect import Probe
from kvpool.cli.errors import Failure
from kvpool.cli.machine import machine_facts
from kvpool.cli.numbers import numbers_of
from kvpool.cli.progress import progress
from kvpool.cli.status import as_text
from kvpool.wire.messages import Statistics

__all__ = ["Outcome", "Run", "judge", "play"]

NewEngine = Callable[[str], contextlib.AbstractContextManager[Engine]]
"""Takes the process's name, for people."""

SHM: Final = "/dev/shm"  # noqa: S108 - the tmpfs itself
L1_BYTES: Final = 512 << 20
MODEL: Final = "large"
"""53 million parameters: enough that computing a long prompt on a CPU takes a second."""

CHUNK_TOKENS: Final = 256
OUTPUT_TOKENS: Final = 16
VOCABULARY: Final = 2000
STORED_WITHIN_S: Final = 20.0
LOOK_AGAIN_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt's result."""

    ttft_s: float
    tokens: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo found."""

    cold: Run
    warm: Run
    loaded: Run
    loaded_chunks: int
    """Chunks that the new process read from the server and that the server vouched for."""

    first_result_s: float
    """From the start of the demo to the answer of the new process."""

    @property
    def tokens_equal(self) -> bool:
        """True if all three answers are the same, token for token."""
        return self.cold.tokens == self.warm.tokens == self.loaded.tokens

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came."""
        return self.cold.ttft_s / self.loaded.ttft_s

    @property
    def ttft_s(self) -> dict[str, float]:
        """Seconds to the first token by name."""
        return {"cold": self.cold.ttft_s, "warm": self.warm.ttft_s, "loaded": self.loaded.ttft_s}


def play(out: Path, prompt_tokens: int) -> str:
    """Run the act; returns what went wrong, empty for a success.

    Args:
        out: existing folder for logs and results.
        prompt_tokens: length of the shared prompt.

    Raises:
        CommandError: a part does not do what it should, or cannot be had.
    """
    start = time.perf_counter()
    _check(prompt_tokens)
    for log in out.glob("engine-*.log"):
        log.unlink()
    python = vllm_env.environment()
    with progress("making the model, once"):
        folder = model(python, MODEL)
    with OwnServer(L1_BYTES) as server, Probe(server.client) as probe:
        say(f"server: {server.client.server}, {L1_BYTES >> 20} MiB of memory")
        new_engine = partial(_engine, python, out, folder, server.client.server, prompt_tokens)
        outcome = _runs(new_engine, probe, prompt_tokens, start)
        status = as_text(probe.statistics())
    _report(outcome, status, prompt_tokens, out)
    return judge(outcome)


def _runs(new_engine: NewEngine, probe: Probe, prompt_tokens: int, start: float) -> Outcome:
    prompt, other = _prompt(1, prompt_tokens + 1), _prompt(2, CHUNK_TOKENS // 2)
    with new_engine("1") as first:
        _run(first, other)  # the first forward of a process pays for more than itself
        cold = _run(first, prompt)
        say(f"cold    {cold.ttft_s * 1e3:7.0f} ms to the first token: computed {prompt_tokens} tokens")
        warm = _run(first, prompt)
        say(f"warm    {warm.ttft_s * 1e3:7.0f} ms: the same process, from its own cache")
        _wait_until_stored(probe, prompt_tokens // CHUNK_TOKENS)
    before = _vouched(probe.statistics())
    with new_engine("2, new") as second:
        _run(second, other)
        loaded = _run(second, prompt)
        first_result_s = time.perf_counter() - start
        say(f"loaded  {loaded.ttft_s * 1e3:7.0f} ms: a new process, from the server ({loaded.cached_tokens} tokens)")
    return Outcome(cold, warm, loaded, _vouched(probe.statistics()) - before, first_result_s)


@contextlib.contextmanager
def _engine(python: Path, out: Path, folder: Path, server: str, prompt_tokens: int, name: str) -> Iterator[Engine]:
    """Start an engine; its numbers are float32, so that greedy tokens are the same whichever way a prefix came."""
    longest = prompt_tokens + 2 * CHUNK_TOKENS
    with contextlib.ExitStack() as stack:
        with progress(f"starting engine process {name}"):
            started = stack.enter_context(
                engine(
                    python, out, folder, max_model_len=longest, max_num_batched_tokens=longest, max_num_seqs=4,
                    kv_transfer_config=connector(server),
                )
            )  # fmt: skip
        yield started


def _run(started: Engine, prompt: list[int]) -> Run:
    """Run one prompt alone."""
    answer = started.generate([prompt], max_tokens=OUTPUT_TOKENS)
    return Run(answer["first_s"][0], tuple(answer["tokens"][0]), answer["cached"][0] or 0)


def _check(prompt_tokens: int) -> None:
    if sys.platform != "linux":
        raise Failure("the demo needs Linux: shared memory and a vLLM built for its CPUs")
    if prompt_tokens < CHUNK_TOKENS:
        raise Failure(f"--tokens: {prompt_tokens} is less than one chunk; use at least {CHUNK_TOKENS}")
    free, need = shutil.disk_usage(SHM).free, 2 * L1_BYTES
    if free < need:
        raise Failure(f"{SHM}: {free >> 20} MiB free, the demo needs {need >> 20}; make room or remount it larger")


def _prompt(seed: int, tokens: int) -> list[int]:
    chance = random.Random(seed)  # noqa: S311 - any tokens will do, the same ones each time
    return [chance.randrange(10, VOCABULARY) for _ in range(tokens)]


def _wait_until_stored(probe: Probe, chunks: int) -> None:
    """Wait until the server holds the whole prompt; the engine stores while it runs on."""
    pause, end = threading.Event(), time.monotonic() + STORED_WITHIN_S
    while (stored := numbers_of(probe.statistics()).stored) < chunks:
        if time.monotonic() > end:
            raise Failure(f"only {stored} of {chunks} chunks were stored; see the engine's log in .demo/")
        pause.wait(LOOK_AGAIN_S)


def _vouched(statistics: Statistics) -> int:
    return numbers_of(statistics).loads.get("vouched", 0)


def _report(outcome: Outcome, status: str, prompt_tokens: int, out: Path) -> None:
    found = {
        "tokens_equal": outcome.tokens_equal,
        "speedup": outcome.speedup,
        "first_result_s": outcome.first_result_s,
        "ttft_s": outcome.ttft_s,
        "prompt_tokens": prompt_tokens,
        "loaded_chunks": outcome.loaded_chunks,
        "output_tokens": list(outcome.loaded.tokens),
        "machine": machine_facts(),
    }
    (out / "demo.json").write_text(json.dumps(found, indent=2) + "\n")
    draw(outcome.ttft_s, prompt_tokens, out / "demo.png")
    say(f"speedup {outcome.speedup:7.1f} times; tokens {'equal' if outcome.tokens_equal else 'DIFFER'}")
    print(f"\nkvpool status\n{status}\n")
    say(f"result after {outcome.first_result_s:.0f} s; wrote {out / 'demo.json'} and {out / 'demo.png'}")


def judge(outcome: Outcome) -> str:
    """Return what is wrong with *outcome*; empty for a success."""
    if not outcome.tokens_equal:
        return f"tokens differ: {outcome.cold.tokens}, {outcome.warm.tokens}, {outcome.loaded.tokens}"
    if not outcome.loaded_chunks:
        return "the new process loaded nothing from the server"
    return ""
