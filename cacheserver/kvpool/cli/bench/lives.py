# SPDX-License-Identifier: Apache-2.0
"""Cells that need a server of their own, since they end it or look into its process: restart, metadata."""

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from kvpool.cli.bench.client import BenchClient
from kvpool.cli.bench.context import Context
from kvpool.cli.bench.options import LEAST_RESTART_BYTES, METADATA_ROUND
from kvpool.cli.bench.own_server import OwnServer
from kvpool.cli.bench.payload import Chain
from kvpool.cli.bench.results import Cell, spread
from kvpool.cli.errors import Failure

__all__ = ["metadata", "resident_metadata_bytes", "restart"]

METADATA_SHARD_BYTES: Final = 4096
RESTART_ROUNDS: Final = 3
FILL_TO: Final = 0.9
"""Share of L1 that is filled before the restart: below where the background evicts."""


def restart(c: Context) -> list[Cell]:
    """Fill an arena, end the server, start it again: seconds from exec to the first whole hit, bytes as before."""
    return [_restart(c, how) for how in (signal.SIGTERM, signal.SIGKILL)]


def metadata(c: Context) -> list[Cell]:
    """Fill an index with many small chunks and look at what the server's process keeps for each."""
    options = msgspec.structs.replace(
        c.options, tokens=METADATA_ROUND * c.chunk_tokens, shard_bytes=METADATA_SHARD_BYTES
    )
    rounds = c.options.metadata_chunks // METADATA_ROUND
    chunks = rounds * METADATA_ROUND
    size = max(2 * chunks * METADATA_SHARD_BYTES, LEAST_RESTART_BYTES)
    with OwnServer(size, memory=c.memory) as own:
        small = replace(c, options=options, config=own.client, own=own)
        with small.client() as client:
            first = small.new_chain()
            client.store(first, "metadata-first")  # what grows once, grows here
            before = resident_metadata_bytes(own.pid)
            for i in range(rounds):
                client.store(small.new_chain(), f"metadata-{i}")
            grown = resident_metadata_bytes(own.pid) - before
            compared = client.load(first, "metadata-compare").compared_bytes
    what = f"growth of the server's own and header memory over {chunks} chunks"
    value = grown / chunks
    return [Cell(name="metadata", what=what, unit="B/chunk", value=value, compared_bytes=compared)]


def resident_metadata_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the resident bytes of a server's heap and of its slot headers; the chunks themselves are not in it."""
    total, counts = 0, False
    for line in (proc / str(pid) / "smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0]:
            # A mapping's first line: anonymous ones have no path, or a name in brackets.
            path = fields[5] if len(fields) > 5 else ""  # noqa: PLR2004 - the path is the sixth field
            counts = not path or path.startswith("[") or path.endswith(".head")
        elif counts and fields[0] == "Rss:":
            total += int(fields[1]) * 1024
    return total


def _restart(c: Context, how: signal.Signals) -> Cell:
    with OwnServer(c.options.restart_bytes, memory=c.memory) as own:
        mine = replace(c, config=own.client, own=own)
        chains = _fill(mine)
        samples, compared = [], 0
        for _ in range(RESTART_ROUNDS):
            own.end(how)
            samples.append(_first_hit(mine, own, chains[0]))
        with mine.client() as client:
            compared = sum(client.load(chain, f"after-{i}").compared_bytes for i, chain in enumerate(chains))
    s, size = spread(samples), f"L1 {c.options.restart_bytes / 2**30:g} GiB"
    return Cell(
        name=f"restart-{how.name.removeprefix('SIG').lower()}",
        what=f"start after {how.name} to first whole hit, {size}, all {len(chains)} prompts hit as before",
        unit="s",
        value=s.p50,
        spread=s,
        compared_bytes=compared,
    )


def _fill(c: Context) -> list[Chain]:
    size = c.chunks * c.options.shard_bytes
    count = int(c.options.restart_bytes * FILL_TO) // size
    if not count:
        raise Failure(f"--restart-bytes: one request has {size} bytes and does not fit; raise it, or lower --tokens")
    chains = [c.new_chain() for _ in range(count)]
    with c.client() as client:
        for i, chain in enumerate(chains):
            client.store(chain, f"fill-{i}")
    return chains


def _first_hit(c: Context, own: OwnServer, chain: Chain) -> float:
    start = time.perf_counter()
    own.start()
    with c.client() as client:
        return _until_whole(client, chain, start)


def _until_whole(client: BenchClient, chain: Chain, start: float) -> float:
    found, _ = client.lookup(chain, "first-hit")
    seconds = time.perf_counter() - start
    client.end("first-hit")
    if found.chunks != chain.chunks:
        raise Failure(f"after the restart {found.chunks} of {chain.chunks} chunks were found ({found.reason})")
    return seconds
