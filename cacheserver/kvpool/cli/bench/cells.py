# SPDX-License-Identifier: Apache-2.0
"""The cells: each measures one thing and compares bytes that came through it. Called one after the other."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Final

from kvpool.cli.bench.client import BenchClient
from kvpool.cli.bench.context import Context
from kvpool.cli.bench.fleet import Fleet
from kvpool.cli.bench.load import LoadOrder
from kvpool.cli.bench.payload import Chain
from kvpool.cli.bench.results import Cell, spread
from kvpool.cli.connect import Probe
from kvpool.cli.errors import Failure
from kvpool.model.identity import Mode
from kvpool.model.keys import chunk_digests, root_digest
from kvpool.wire.messages import Ping, Statistics

__all__ = ["killed", "load", "lookup", "transfer"]

MS: Final = 1e3
PING_EVERY_S: Final = 0.002
KILL_ROUNDS: Final = 5
FREED_WITHIN_S: Final = 30.0
LOOK_AGAIN_S: Final = 0.005


def lookup(c: Context) -> list[Cell]:
    """Lookups of a whole stored prompt, with digests at hand and with first sight of the tokens."""
    with c.client() as client:
        chain = c.new_chain()
        client.store(chain, "lookup-store")
        warm = [_timed_lookup(client, chain, f"warm-{i}", lambda: chain) for i in c.rounds()]
        first = [_timed_lookup(client, chain, f"first-{i}", lambda: _hashed(c, chain)) for i in c.rounds()]
        compared = client.load(chain, "lookup-compare").compared_bytes
    size = f"{c.options.tokens} tokens, {chain.chunks} chunks, all hit"
    return [
        _cell("lookup", f"client to client, {size}", "ms", warm, compared),
        _cell("lookup-first-sight", f"the same with hashing the tokens, {size}", "ms", first, compared),
    ]


def transfer(c: Context) -> list[Cell]:
    """Stores and loads of whole prompts, by the two modes that need no GPU."""
    return [cell for mode in (Mode.CLIENT_MOVED, Mode.STREAMED) for cell in _transfer(c, mode)]


def load(c: Context) -> list[Cell]:
    """Cycles a second of several clients, and another client's pings meanwhile."""
    with c.client() as client:
        numbers = [next(c.numbers) for _ in range(c.options.clients)]
        for number in numbers:
            client.store(c.chain(number), f"load-store-{number}")
    with Fleet([_order(c, "cycle", n) for n in numbers]) as fleet, Probe(c.config) as probe:
        fleet.go()
        pings = _pings(probe, c.options.seconds)
        results = fleet.results()
    compared = sum(r.compared_bytes for r in results) if all(r.compared_bytes for r in results) else 0
    rate = sum(r.cycles / r.seconds for r in results)
    what = f"{c.options.clients} clients: lookup, plan, free, end of {c.options.tokens} tokens"
    return [
        Cell(name="cycles", what=what, unit="1/s", value=rate, compared_bytes=compared),
        _cell("ping-under-load", f"another client, while {what}", "ms", pings, compared),
    ]


def killed(c: Context) -> list[Cell]:
    """From SIGKILL of a client that holds pins and slots to the last of its leases gone."""
    with c.client() as client, Probe(c.config) as probe:
        number = next(c.numbers)
        client.store(c.chain(number), "killed-store")
        samples = [_kill_one(c, number, probe) * MS for _ in range(KILL_ROUNDS)]
        compared = client.load(c.chain(number), "killed-compare").compared_bytes
    return [_cell("client-killed", "SIGKILL of a client to all its leases gone", "ms", samples, compared)]


def _cell(name: str, what: str, unit: str, samples: list[float], compared: int) -> Cell:
    s = spread(samples)
    return Cell(name=name, what=what, unit=unit, value=s.p50, spread=s, compared_bytes=compared)


def _timed_lookup(client: BenchClient, chain: Chain, request_id: str, see: Callable[[], Chain]) -> float:
    start = time.perf_counter()
    found, _ = client.lookup(see(), request_id)
    seconds = time.perf_counter() - start
    client.end(request_id)
    if found.chunks != chain.chunks:
        raise Failure(f"{found.chunks} of {chain.chunks} chunks found ({found.reason})")
    return seconds * MS


def _hashed(c: Context, chain: Chain) -> Chain:
    return Chain(chain.name, chain.tokens, chunk_digests(root_digest(c.namespace), chain.tokens, c.chunk_tokens))


def _transfer(c: Context, mode: Mode) -> list[Cell]:
    size = c.chunks * c.options.shard_bytes
    stores, loads, compared = [], [], 0
    with c.client(mode) as client:
        for i in c.rounds():
            chain = c.new_chain()
            stores.append(size / client.store(chain, f"{mode}-store-{i}") / 1e9)
            loaded = client.load(chain, f"{mode}-load-{i}")
            loads.append(size / loaded.seconds / 1e9)
            compared += loaded.compared_bytes
    what = f"{c.chunks} chunks of {c.options.shard_bytes} bytes, completion waited, checksums on"
    return [
        _cell(f"store-{mode}", what, "GB/s", stores, compared),
        _cell(f"retrieve-{mode}", what, "GB/s", loads, compared),
    ]


def _order(c: Context, work: str, number: int) -> LoadOrder:
    config = c.config
    return LoadOrder(
        work="cycle" if work == "cycle" else "hold",
        server=config.server,
        server_key=config.server_key,
        secret_file=config.secret_file,
        token_file=config.token_file,
        chunk_tokens=c.chunk_tokens,
        number=number,
        options=c.options,
    )


def _pings(probe: Probe, seconds: float) -> list[float]:
    pause, samples, end = threading.Event(), [], time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        probe.call(Ping())
        samples.append((time.perf_counter() - start) * MS)
        pause.wait(PING_EVERY_S)
    return samples


def _kill_one(c: Context, number: int, probe: Probe) -> float:
    before = probe.statistics()
    with Fleet([_order(c, "hold", number)]) as fleet:
        held = probe.statistics()
        if held.leases <= before.leases or held.l1_pinned_bytes <= before.l1_pinned_bytes:
            raise Failure("the client that is to be killed holds nothing; the server's numbers are wrong")
        start = time.perf_counter()
        fleet.members[0].send_signal(signal.SIGKILL)
        _wait_until(lambda: _freed(probe.statistics(), before), "the leases of a killed client are still held")
        return time.perf_counter() - start


def _freed(now: Statistics, before: Statistics) -> bool:
    return now.leases <= before.leases and now.l1_pinned_bytes <= before.l1_pinned_bytes


def _wait_until(done: Callable[[], bool], otherwise: str) -> None:
    pause, end = threading.Event(), time.monotonic() + FREED_WITHIN_S
    while not done():
        if time.monotonic() > end:
            raise Failure(f"{otherwise} after {FREED_WITHIN_S:.0f} s")
        pause.wait(LOOK_AGAIN_S)
