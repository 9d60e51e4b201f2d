# SPDX-License-Identifier: Apache-2.0
"""What a new process gains by what another one stored: vLLM's time to the first token, recomputing over loading.

    python -m tests.bench.engine_second_request [--prompts 8] [--json build/second.json]

One real engine on CPU computes long prompts and ends; a new process answers each of them from the server and, beside
each, a new prompt of the same length that it has to compute. Metric: seconds from the submission to the first token.
The new process must answer with the tokens of the one that computed, and must have loaded all that a prompt can reuse.
"""

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from tests.engine.conftest import model
from tests.engine.harness import Engine, connector, engine, server
from tools import vllm_env

from kvpool.cli.bench.command import write_report
from kvpool.cli.bench.results import BenchReport, Cell, spread, table
from kvpool.cli.machine import machine_facts

CHUNK_TOKENS = 256
PREFIX_TOKENS, NEW_TOKENS = 2048, 16
VOCABULARY = 900
MIB = 1 << 20


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        computed_s, loaded_s, compared = measured(Path(folder), o.prompts, random.Random(o.seed))
    cells = results(computed_s, loaded_s, compared)
    sys.stdout.write(f"{table(cells)}\n")
    if o.json:
        options = {"prompts": o.prompts, "prefix_tokens": PREFIX_TOKENS, "new_tokens": NEW_TOKENS}
        machine = machine_facts() | {"vllm": vllm_env.chosen_version()}
        report = BenchReport(bench="engine-reuse", cells=tuple(cells), options=options, machine=machine)
        o.json.parent.mkdir(parents=True, exist_ok=True)
        write_report(str(o.json), report)
    return 0


def measured(folder: Path, count: int, chance: random.Random) -> tuple[list[float], list[float], int]:
    """Return the seconds to the first token, computed and loaded, pair by pair; and the bytes of tokens compared."""
    shared, other = _prompts(chance, count), _prompts(chance, count)
    chunks = count * PREFIX_TOKENS // CHUNK_TOKENS
    computed_s, loaded_s = [], []
    with server(folder, size_bytes=1024 * MIB, chunk_tokens=CHUNK_TOKENS) as cache:
        started = partial(_started, folder, connector(cache.address))
        with started() as first:
            expected = [first.generate([prompt], max_tokens=NEW_TOKENS)["tokens"] for prompt in shared]
            cache.wait_chunks(chunks)
        with started() as second:
            for prompt, new, tokens in zip(shared, other, expected, strict=True):
                loaded = second.generate([prompt], max_tokens=NEW_TOKENS)
                if loaded["tokens"] != tokens:
                    raise SystemExit("WRONG TOKENS: the new process answers otherwise; no number counts")
                computed = second.generate([new], max_tokens=NEW_TOKENS)
                if (loaded["cached"], computed["cached"]) != ([PREFIX_TOKENS], [0]):
                    raise SystemExit(
                        f"{loaded['cached']} and {computed['cached']} tokens were reused; no number counts"
                    )
                loaded_s.append(loaded["first_s"][0])
                computed_s.append(computed["first_s"][0])
    return computed_s, loaded_s, 4 * count * NEW_TOKENS


def results(computed_s: list[float], loaded_s: list[float], compared: int) -> list[Cell]:
    """Return the cells: seconds to the first token both ways, and the median of the pairs' ratios."""
    what = f"first token after {PREFIX_TOKENS} tokens, large model, a new process"
    ratios = np.asarray(computed_s) / np.asarray(loaded_s)
    ways = (("computed", spread(computed_s)), ("loaded", spread(loaded_s)))
    return [
        *(
            Cell(
                name=f"second-request-{way}",
                what=f"{what}: {way}",
                unit="s",
                value=s.p50,
                spread=s,
                compared_bytes=compared,
            )
            for way, s in ways
        ),
        Cell(
            name="second-request-speedup",
            what=f"computed over loaded, median of {len(ratios)} pairs, the least {ratios.min():.1f}",
            unit="ratio",
            value=float(np.median(ratios)),
            compared_bytes=compared,
        ),
    ]


def _prompts(chance: random.Random, count: int) -> list[list[int]]:
    return [[chance.randrange(10, VOCABULARY) for _ in range(PREFIX_TOKENS + 1)] for _ in range(count)]


@contextmanager
def _started(folder: Path, transfer: dict[str, object]) -> Iterator[Engine]:
    """Start an engine that has computed something already: the first forward of a process pays for more than itself."""
    python, longest = vllm_env.environment(), PREFIX_TOKENS + 2 * CHUNK_TOKENS
    options = {"max_model_len": longest, "max_num_batched_tokens": longest, "max_num_seqs": 4}
    with engine(python, folder, model(python, "large"), kv_transfer_config=transfer, **options) as made:
        made.generate([list(range(10, 10 + CHUNK_TOKENS // 2))], max_tokens=NEW_TOKENS)
        yield made


if __name__ == "__main__":
    sys.exit(main())
