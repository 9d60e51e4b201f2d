# SPDX-License-Identifier: Apache-2.0
"""A load-generating client, as a process of its own: `python -m kvpool.cli.bench.load`, orders as JSON on its input.

It prints "ready", waits for a line on its input, does its work, and prints its result as one line of JSON.
"""

import os
import sys
import time
from typing import Literal

import msgspec
from msgspec import Struct

from kvpool.cli.bench.client import BenchClient
from kvpool.cli.bench.options import Options
from kvpool.cli.bench.payload import Chain, Payload, bench_namespace, make_chain
from kvpool.cli.errors import CommandError, Failure
from kvpool.config import ClientConfig
from kvpool.model.identity import Mode
from kvpool.wire.messages import FreeLookup, PrepareRetrieve, PrepareStore

__all__ = ["LoadOrder", "LoadResult", "main"]


class LoadOrder(Struct, frozen=True, kw_only=True):
    """What one process is to do with one prompt."""

    work: Literal["cycle", "hold"]
    server: str
    server_key: str = ""
    secret_file: str = ""
    token_file: str = ""
    chunk_tokens: int
    number: int
    """Number of the prompt; it is stored already."""

    options: Options


class LoadResult(Struct, frozen=True, kw_only=True):
    """What one process did."""

    cycles: int = 0
    seconds: float = 0.0
    compared_bytes: int = 0


def main() -> int:
    """Do one order; 1 after a failure, whose text is on standard error."""
    try:
        order = msgspec.json.decode(sys.stdin.readline(), type=LoadOrder)
        result = _work(order)
    except (CommandError, msgspec.MsgspecError) as e:
        print(e, file=sys.stderr)
        return 1
    _say(msgspec.json.encode(result).decode())
    return 0


def _work(order: LoadOrder) -> LoadResult:
    o = order.options
    config = ClientConfig(
        server=order.server, server_key=order.server_key, secret_file=order.secret_file, token_file=order.token_file
    )
    namespace = bench_namespace(o.shard_bytes, o.seed)
    chain = make_chain(namespace, order.number, o.tokens, order.chunk_tokens, o.seed)
    client = BenchClient(config, namespace, Payload(o.shard_bytes, o.seed), chain.chunks, Mode.CLIENT_MOVED)
    with client:
        return _cycle(client, chain, o.seconds) if order.work == "cycle" else _hold(client, chain)


def _cycle(client: BenchClient, chain: Chain, seconds: float) -> LoadResult:
    """Repeat what a request costs the control plane, then load once and compare."""
    _say("ready")
    sys.stdin.readline()
    start, cycles = time.perf_counter(), 0
    while (now := time.perf_counter()) < start + seconds:
        request_id = f"cycle-{os.getpid()}-{cycles}"
        found, lookup_id = client.lookup(chain, request_id)
        if found.chunks != chain.chunks:
            raise Failure(f"{found.chunks} of {chain.chunks} chunks found during the load ({found.reason})")
        client.session.call(PrepareRetrieve(lookup_id=lookup_id, end=chain.chunks))
        client.session.call(FreeLookup(lookup_id=lookup_id))
        client.end(request_id)
        cycles += 1
    compared = client.load(chain, f"compare-{os.getpid()}").compared_bytes
    return LoadResult(cycles=cycles, seconds=now - start, compared_bytes=compared)


def _hold(client: BenchClient, chain: Chain) -> LoadResult:
    """Hold a lookup's pins and a store's slots, with nothing to end them but this process's death."""
    client.lookup(chain, "held")
    unwritten = os.urandom(32 * chain.chunks)
    client.session.call(PrepareStore(request_id="held", store_id=os.urandom(16)), [unwritten])
    _say("ready")
    sys.stdin.readline()
    return LoadResult()


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
