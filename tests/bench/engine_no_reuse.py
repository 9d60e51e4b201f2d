# SPDX-License-Identifier: Apache-2.0
"""What the connector costs an engine that finds nothing to reuse: vLLM with it against vLLM alone, in pairs.

    python -m tests.bench.engine_no_reuse [--pairs 24] [--json build/engine.json]

Three real engines on CPU, started once: two alone and one with the connector and a server. In each round all of them
answer the same new prompts, one engine after the other in a changing order, each with the machine to itself. The two
that are alone show what such a pair can resolve: their difference is noise. Metric: seconds from the submission of a
batch to its last token. All engines must answer with the same tokens.
"""

import argparse
import json
import math
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
from tests.engine.conftest import model
from tests.engine.harness import Engine, connector, server
from tools import vllm_env

from kvpool.cli.bench.results import BenchReport, Cell, spread, table
from kvpool.cli.machine import machine_facts

ALONE, AGAIN, WITH = "alone", "again", "with"
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 4, 768, 48
CHUNK_TOKENS = 256
VOCABULARY = 900
WARM_UP = 3
RESAMPLES = 20_000
MIB = 1 << 20


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=("small", "large"), default="large")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    seconds, compared = measured(o.pairs, o.seed, o.model)
    cells = results(seconds, compared, o.model)
    sys.stdout.write(f"{table(cells)}\n")
    if o.json:
        options = {"pairs": o.pairs, "requests": REQUESTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
        machine = machine_facts() | {"vllm": vllm_env.chosen_version(), "model": o.model}
        report = BenchReport(bench="engine", cells=tuple(cells), options=options, machine=machine)
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps(msgspec.to_builtins(report), indent=2) + "\n")
    return 0


def measured(pairs: int, seed: int, size: str) -> tuple[dict[str, list[float]], int]:
    """Return each engine's seconds, one a round, and how many bytes of tokens were compared."""
    chance, python = random.Random(seed), vllm_env.environment()
    weights = model(python, size)
    seconds: dict[str, list[float]] = {ALONE: [], AGAIN: [], WITH: []}
    compared = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        cache = stack.enter_context(server(folder, size_bytes=512 * MIB, chunk_tokens=CHUNK_TOKENS))
        engines = {}
        for name in (ALONE, AGAIN, WITH):
            options = {"kv_transfer_config": connector(cache.address)} if name == WITH else {}
            engines[name] = Engine(python, folder, weights, workers=True, **options)
            stack.callback(engines[name].close)
            engines[name].ready()
        for number in range(-WARM_UP, pairs):
            say(f"pair {number + 1} of {pairs}" if number >= 0 else "warming up")
            prompts = [[chance.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]
            tokens = {}
            for name in chance.sample(list(engines), len(engines)):
                said = engines[name].generate(prompts, max_tokens=NEW_TOKENS)
                if any(said["cached"]):
                    raise SystemExit(f"{name}: something was reused, so this run says nothing")
                tokens[name] = said["tokens"]
                if number >= 0:
                    seconds[name].append(said["seconds"])
                cache.wait_no_leases()
            if len({json.dumps(t) for t in tokens.values()}) > 1:
                raise SystemExit("WRONG TOKENS: the engines do not answer the same; no number counts")
            compared += 4 * sum(map(len, tokens[WITH])) * len(tokens)
        stored = cache.statistics().chunks
        if not stored:
            raise SystemExit("the engine with the connector stored nothing; its number says nothing")
    return seconds, compared


def results(seconds: dict[str, list[float]], compared: int, size: str) -> list[Cell]:
    """Return the cells: seconds of each engine, and the two comparisons."""
    what = f"{size} model, {REQUESTS} new prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new tokens each"
    cells = [
        Cell(name=f"batch-{name}", what=what, unit="s", value=s.p50, spread=s, compared_bytes=compared)
        for name, s in ((name, spread(values)) for name, values in seconds.items())
    ]
    for name, other, words in (("itself", AGAIN, "a second engine alone"), ("no-reuse", WITH, "with the connector")):
        mean, upper = slower(seconds[other], seconds[ALONE])
        text = f"{words}, over the first one alone, mean of {len(seconds[ALONE])} pairs"
        cells.append(Cell(name=f"{name}-slowdown", what=text, unit="%", value=mean, compared_bytes=compared))
        upper_text = f"upper 95 % bound of it ({RESAMPLES} resamples of the pairs)"
        cells.append(
            Cell(name=f"{name}-slowdown-upper", what=upper_text, unit="%", value=upper, compared_bytes=compared)
        )
    return cells


def slower(these: Sequence[float], those: Sequence[float]) -> tuple[float, float]:
    """Return by how many percent *these* are slower than *those*, pair by pair: the mean, and its upper 95 % bound."""
    ratios = np.log(np.asarray(these) / np.asarray(those))
    chosen = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    upper = float(np.percentile(ratios[chosen].mean(axis=1), 95))
    return 100 * math.expm1(float(ratios.mean())), 100 * math.expm1(upper)


def say(text: str) -> None:
    """Tell the person who waits."""
    sys.stderr.write(f"bench engine: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
