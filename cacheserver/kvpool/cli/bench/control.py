# SPDX-License-Identifier: Apache-2.0
"""`kvpool bench control`: runs the cells, prints the table, writes the JSON."""

import argparse
import contextlib
from collections.abc import Callable
from typing import Final

import msgspec

from kvpool.cli.bench import cells, lives
from kvpool.cli.bench.command import terminated_like_interrupted, write_report
from kvpool.cli.bench.context import Context
from kvpool.cli.bench.options import Options, options_of
from kvpool.cli.bench.own_server import OwnServer
from kvpool.cli.bench.results import BenchReport, Cell, table
from kvpool.cli.connect import Probe
from kvpool.cli.errors import Failure, UsageError
from kvpool.cli.machine import machine_facts
from kvpool.cli.progress import progress
from kvpool.cli.settings import client_config
from kvpool.config import ClientConfig
from kvpool.wire.messages import Clear

__all__ = ["run"]

CELLS: Final[dict[str, Callable[[Context], list[Cell]]]] = {
    "lookup": cells.lookup,
    "transfer": cells.transfer,
    "load": cells.load,
    "killed": cells.killed,
    "restart": lives.restart,
    "metadata": lives.metadata,
}
NEED_OWN: Final = frozenset({"restart", "metadata"})
L1_REQUESTS: Final = 16
"""The own server holds this many requests, so that pins of all clients stay below their share."""

LEAST_L1_BYTES: Final = 256 << 20


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        UsageError: an option is out of range.
        Failure: the server failed, or bytes were wrong: then no number is printed.
    """
    options, names = options_of(args), _names(args.cells)
    with terminated_like_interrupted():
        if args.server:
            found = _measure(_context(options, client_config(args), None, args), names)
        else:
            with OwnServer(_l1_bytes(options), memory=args.directory or "/dev/shm") as own:  # noqa: S108
                found = _measure(_context(options, own.settle().client, own, args), names)
    print(table(found))
    if args.json:
        write_report(
            args.json,
            BenchReport(bench="control", cells=tuple(found), options=_shown(options), machine=machine_facts()),
        )
    return 0


def _names(given: str | None) -> list[str]:
    names = given.split(",") if given else list(CELLS)
    if unknown := [n for n in names if n not in CELLS]:
        raise UsageError(f"--cells: no cell is called {', '.join(unknown)}; there are {', '.join(CELLS)}")
    return names


def _context(options: Options, config: ClientConfig, own: OwnServer | None, args: argparse.Namespace) -> Context:
    with Probe(config) as probe:
        chunk_tokens = probe.welcome.chunk_tokens
    if options.tokens < chunk_tokens:
        raise UsageError(f"--tokens: {options.tokens} is less than one chunk; use at least {chunk_tokens}")
    return Context(options, config, chunk_tokens, own, args.directory or "/dev/shm")  # noqa: S108


def _measure(c: Context, names: list[str]) -> list[Cell]:
    found: list[Cell] = []
    try:
        for i, name in enumerate(names):
            if name in NEED_OWN and c.own is None:
                found.append(
                    Cell(name=name, what="", unit="", skipped="needs a server of its own; run without --server")
                )
                continue
            with progress(f"bench control: {name} ({i + 1} of {len(names)})"):
                found += CELLS[name](c)
    finally:
        _tidy(c)
    return found


def _tidy(c: Context) -> None:
    """Leave nothing of the bench in a server of somebody else."""
    if c.own is None:
        with contextlib.suppress(Failure), Probe(c.config) as probe:
            probe.call(Clear(model=c.namespace.model))


def _l1_bytes(o: Options) -> int:
    # 256 tokens are the default chunk, which the own server keeps.
    request = -(-o.tokens // 256) * max(o.shard_bytes, 4096)
    return max(LEAST_L1_BYTES, L1_REQUESTS * request)


def _shown(o: Options) -> dict[str, object]:
    shown: dict[str, object] = msgspec.to_builtins(o)
    return shown
