# SPDX-License-Identifier: Apache-2.0
"""What the connector costs an engine that finds nothing to reuse: vLLM with it against vLLM alone, in pairs.

    python -m tests.bench.engine_no_reuse [--pairs 24] [--starts 3] [--json build/engine.json]

Three real engines on CPU: two alone and one with the connector and a server. In each round all of them answer the same
new prompts, one engine after the other in a changing order, each with the machine to itself. The two that are alone
show what such a pair can resolve: their difference is noise. Some of it is a process's own (where its memory lies), so
all engines are started anew a few times. Metric: seconds from the submission of a batch to its last token. All engines
must answer with the same tokens.
"""

import argparse
import json
import math
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from tests.engine.conftest import model
from tests.engine.harness import Engine, Server, connector, server
from tools import vllm_env

from kvpool.cli.bench.command import write_report
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
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=("small", "large"), default="large")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    seconds, compared = measured(o.pairs, o.starts, o.seed, o.model)
    cells = results(seconds, compared, o.model)
    sys.stdout.write(f"{table(cells)}\n")
    if o.json:
        options = {
            "pairs": o.pairs,
            "starts": o.starts,
            "requests": REQUESTS,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": NEW_TOKENS,
        }
        machine = machine_facts() | {"vllm": vllm_env.chosen_version(), "model": o.model}
        report = BenchReport(bench="engine", cells=tuple(cells), options=options, machine=machine)
        o.json.parent.mkdir(parents=True, exist_ok=True)
        write_report(str(o.json), report)
    return 0


def measured(pairs: int, starts: int, seed: int, size: str) -> tuple[dict[str, list[float]], int]:
    """Return each engine's seconds, one a round, and how many bytes of tokens were compared."""
    chance = random.Random(seed)
    seconds: dict[str, list[float]] = {ALONE: [], AGAIN: [], WITH: []}
    compared = 0
    for start in range(starts):
        rounds = pairs // starts + (start < pairs % starts)
        with _started(size) as (cache, engines):
            for number in range(-WARM_UP, rounds):
                say(
                    f"start {start + 1} of {starts}: "
                    + (f"pair {number + 1} of {rounds}" if number >= 0 else "warming up")
                )
                took, count = _round(engines, cache, chance)
                if number >= 0:
                    compared += count
                    for name, values in seconds.items():
                        values.append(took[name])
            if not cache.statistics().chunks:
                raise SystemExit("the engine with the connector stored nothing; its number says nothing")
    return seconds, compared


@contextmanager
def _started(size: str) -> Iterator[tuple[Server, dict[str, Engine]]]:
    python = vllm_env.environment()
    weights = model(python, size)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        cache = stack.enter_context(server(folder, size_bytes=512 * MIB, chunk_tokens=CHUNK_TOKENS))
        engines = {}
        for name in (ALONE, AGAIN, WITH):
            options = {"kv_transfer_config": connector(cache.address)} if name == WITH else {}
            engines[name] = Engine(python, folder, weights, workers=True, **options)
            stack.callback(engines[name].close)
            engines[name].ready()
        yield cache, engines


def _round(engines: dict[str, Engine], cache: Server, chance: random.Random) -> tuple[dict[str, float], int]:
    """Let all engines answer new prompts; returns each one's seconds, and the bytes of tokens that were compared."""
    prompts = [[chance.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]
    seconds, tokens = {}, {}
    for name in chance.sample(list(engines), len(engines)):
        said = engines[name].generate(prompts, max_tokens=NEW_TOKENS)
        if any(said["cached"]):
            raise SystemExit(f"{name}: something was reused, so this run says nothing")
        seconds[name], tokens[name] = said["seconds"], said["tokens"]
        cache.wait_no_leases()
    if len({json.dumps(t) for t in tokens.values()}) > 1:
        raise SystemExit("WRONG TOKENS: the engines do not answer the same; no number counts")
    return seconds, 4 * sum(map(len, tokens[WITH])) * len(tokens)


def results(seconds: dict[str, list[float]], compared: int, size: str) -> list[Cell]:
    """Return the cells: seconds of each engine, and the two comparisons."""
    what = f"{size} model, {REQUESTS} new prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new tokens each"
    cells = [
        Cell(name=f"batch-{name}", what=what, unit="s", value=s.p50, spread=s, compared_bytes=compared)
        for name, s in ((name, spread(values)) for name, values in seconds.items())
    ]
    alone = np.sqrt(np.multiply(seconds[ALONE], seconds[AGAIN]))
    for name, these, those, words in (
        ("itself", seconds[AGAIN], seconds[ALONE], "one engine alone over another one alone"),
        ("no-reuse", seconds[WITH], alone, "with the connector over alone (of both, the geometric mean)"),
    ):
        mean, lower, upper = slower(these, those)
        text = f"{words}, mean of {len(alone)} pairs"
        bound = f"95 % bound of it ({RESAMPLES} resamples of the pairs)"
        cells += [
            Cell(name=f"{name}-slowdown{which}", what=what, unit="%", value=value, compared_bytes=compared)
            for which, what, value in (
                ("", text, mean),
                ("-lower", f"lower {bound}", lower),
                ("-upper", f"upper {bound}", upper),
            )
        ]
    return cells


def slower(these: ArrayLike, those: ArrayLike) -> tuple[float, float, float]:
    """Return by how many percent *these* are slower than *those*, pair by pair: mean, lower and upper 95 % bound."""
    ratios = np.log(np.divide(these, those))
    chosen = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    lower, upper = np.percentile(ratios[chosen].mean(axis=1), (5, 95))
    return tuple(100 * math.expm1(float(v)) for v in (ratios.mean(), lower, upper))


def say(text: str) -> None:
    """Tell the person who waits."""
    sys.stderr.write(f"bench engine: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
