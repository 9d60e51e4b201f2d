# SPDX-License-Identifier: Apache-2.0
"""The peer (LMCache's server of several processes, its native extension loaded) on a GPU, in the layouts of our bench.

    python tools/peer_gpu.py build --into /tmp/peer                      # once on the machine, without a network
    python -m kvpool.cli.main bench gpu --runs 32768,4096 --json ours.json
    python -m tests.bench.peer_gpu --site /tmp/peer --ours ours.json --json peer.json
    python benchmarks/judge.py peer.json

This process is the engine: it drives the peer through the peer's own adapters, waits for its completion events, and
keeps the device busy with the same products as our bench does. Targets are poisoned and all bytes compared around
everything that is timed. The peer does not evict to make room, so stores go in spans that fit into its memory, and only
the spans are timed.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.bench.peer_gpu_compare import WrongBytes, busy_rate, compared

from kvpool.cli.bench.command import write_report
from kvpool.cli.bench.results import BenchReport, Cell, spread, table
from kvpool.cli.errors import Failure
from kvpool.cli.machine import machine_facts

ROOT = Path(__file__).resolve().parents[2]
PORT = 5598
UP_S = 120.0
GIB = 1 << 30
CELLS = ("idle", "products", "kernels", "alone", "lookup")
WAYS = {"store": (True, False), "load": (False, True), "both": (True, True)}
RUNS = (32768, 4096)
ALONE = ((32768, 4096), (32768, 16384), (4096, 131072))
"""Run and tokens of single requests, as in our bench."""

ROUNDS, LOOKUPS = 6, 15
FILL = 0.9
SETTLE_S, ALONE_S = 0.3, 0.9
PAUSE = threading.Event()
Found = Iterator[Cell]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; what was measured before a failure is kept, except beside wrong bytes."""
    o = parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"peer_gpu: not over after {o.limit} s (--limit)"))
    signal.alarm(o.limit)
    extension = checked(o.site)
    os.environ |= quiet(o.site)
    sys.path.insert(0, str(o.site))
    ours = json.loads(o.ours.read_text()) if o.ours else None
    cells: list[Cell] = []
    failed = ""
    try:
        with peer_server(o.site, o.l1, rehearse=o.rehearse) as server:
            for cell in measured(o, server):
                say(cell.name if o.rehearse else f"{cell.name}: {cell.value:.4g} {cell.unit}")
                cells.append(cell)
            extension["in_server"] = server.native(o.site)
    except Failure as e:
        failed = str(e)
        say(f"FAILED: {failed}")
        if isinstance(e, WrongBytes):
            return 1
    except SystemExit as e:
        failed = str(e.code)
        say(f"ENDED: {failed}")
    if o.rehearse:
        say(f"{len(cells)} cells rehearsed; numbers of a CPU are not shown")
        return 1 if failed else 0
    cells += compared(cells, ours)
    sys.stdout.write(f"{table(cells)}\n")
    if o.json:
        options = {"l1": o.l1, "job": o.job, "seconds": o.seconds, "cells": o.cells}
        machine = machine_facts() | {"peer": extension, "gpu": gpu_name(), "failed": failed}
        report = BenchReport(bench="peer-gpu", cells=tuple(cells), options=options, machine=machine)
        write_report(str(o.json), report)
    return 1 if failed else 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; sizes in GiB."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--site", type=Path, required=True, help="where tools/peer_gpu.py put the peer")
    parser.add_argument("--ours", type=Path, help="what `kvpool bench gpu --json` wrote in the same call")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cells", default=",".join(CELLS), help="some of %(default)s")
    parser.add_argument("--l1", type=int, default=16, help="the server's memory, GiB (default: %(default)s)")
    parser.add_argument("--job", type=float, default=2.0, help="GiB of one job (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.2, help="timed for each cell (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=240, help="seconds after which to give up (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="go the way on a CPU; its numbers say nothing")
    o = parser.parse_args(arguments)
    o.cells = o.cells.split(",")
    if unknown := [name for name in o.cells if name not in CELLS]:
        parser.error(f"--cells: no cell is called {', '.join(unknown)}; there are {', '.join(CELLS)}")
    if o.ours and not o.ours.is_file():
        parser.error(f"--ours {o.ours}: no such file; write it with `kvpool bench gpu --json {o.ours}`")
    if 3 * o.job > FILL * o.l1:
        parser.error(f"--job {o.job:g}: three jobs do not fit into --l1 {o.l1}; the peer does not evict to make room")
    return o


def measured(o: argparse.Namespace, server: "Server") -> Found:
    """Yield the peer's cells."""
    import torch
    from tests.bench import peer_gpu_engine as engines

    device = "cpu" if o.rehearse else "cuda"
    ceiling = dict.fromkeys(WAYS, 1.0)
    if not o.rehearse:
        from kvpool.cli.bench.gpu_ceiling import ceilings

        torch.zeros(1, device=device)
        ceiling = ceilings("/dev/shm")

    @contextlib.contextmanager
    def engine(run: int, tokens: int = 0, heads_first: bool = False) -> Iterator[Any]:
        shape = engines.Shape(run, engines.CHUNK_TOKENS, heads_first)
        shape = shape._replace(tokens=tokens or int(o.job * GIB) // shape.chunk_bytes * engines.CHUNK_TOKENS)
        with engines.Engine(server.url, shape, device, server.alive) as made:
            yield made
        if not o.rehearse:
            torch.cuda.empty_cache()

    stores = int(FILL * o.l1 / o.job) - 2
    plan = Plan(ceiling, o.seconds, stores)
    total = 0
    for run in RUNS:
        with engine(run) as one:
            found = [*cells_of(one, plan, o.cells, rehearse=o.rehearse)]
        total += sum(cell.compared_bytes for cell in found)
        yield from found
    if "alone" in o.cells:
        for run, tokens in ALONE:
            with engine(run, engines.CHUNK_TOKENS if o.rehearse else tokens) as one:
                yield from alone(one, tokens, ceiling)
    if "kernels" in o.cells:
        with engine(RUNS[0], heads_first=True) as one:
            wanted = [name for name in o.cells if name in ("idle", "products")] or ["idle", "products"]
            yield from cells_of(one, plan, wanted, rehearse=o.rehearse)
    for way in () if o.rehearse else WAYS:
        what = f"copies of 1 GiB between the device and registered shared memory, {way}"
        yield Cell(name=f"ceiling-{way}", what=what, unit="GB/s", value=ceiling[way], compared_bytes=total)


class Plan(msgspec.Struct, frozen=True):
    """What the cells of one engine need."""

    ceiling: dict[str, float]
    seconds: float
    stores: int


def cells_of(engine: Any, plan: Plan, names: Sequence[str], *, rehearse: bool = False) -> Found:
    """Yield the cells of one cache."""
    if "idle" in names:
        yield from moving(engine, plan, None)
    if "products" in names and not rehearse:
        from kvpool.cli.bench.gpu_work import Products

        with contextlib.closing(Products()) as work:
            yield from moving(engine, plan, work)
    if "lookup" in names:
        from tests.bench.peer_gpu_engine import lookups

        samples, moved = lookups(engine, LOOKUPS)
        tokens = engine.shape.tokens // 1024
        what = f"lookup of {tokens}k tokens, all there, until its answer is known"
        name, found = f"lookup-{tokens}k-tokens-peer", spread(samples)
        yield Cell(name=name, what=what, unit="ms", value=found.p50, spread=found, compared_bytes=moved)


def moving(engine: Any, plan: Plan, work: Any) -> Found:
    """Store, load and both at once; idle, or while *work* keeps the device busy."""
    from tests.bench.peer_gpu_engine import flow

    for way, kinds in WAYS.items():
        name = f"{way}-{engine.shape.label}" + ("-products" if work else "")
        before = at_rest(work) if work else 0.0
        spans, moved = flow(engine, kinds, plan.seconds, plan.stores)
        seconds = sum(s.ended_s - s.began_s for s in spans)
        gb_s = sum(s.bytes_moved for s in spans) / seconds / 1e9
        details = {
            "of_ceiling": round(gb_s / plan.ceiling[way], 4),
            "spans": float(len(spans)),
            "seconds": round(seconds, 3),
        }
        what = f"{way}, runs of {engine.shape.label}, {'products meanwhile' if work else 'idle'}"
        yield Cell(name=f"{name}-peer", what=what, unit="GB/s", value=gb_s, compared_bytes=moved, details=details)
        if work:
            busy = busy_rate(work.rate, [(s.began_s, s.ended_s) for s in spans])
            rest = statistics.mean((before, at_rest(work)))
            work.switch(on=False)
            details = {"alone": round(rest, 1), "with": round(busy, 1)}
            what, lost = "what Products lose meanwhile", 100 * (1 - busy / rest)
            yield Cell(name=f"loss-{name}-peer", what=what, unit="%", value=lost, compared_bytes=moved, details=details)


def alone(engine: Any, tokens: int, ceiling: dict[str, float]) -> Found:
    """Yield single requests, nothing else under way."""
    from tests.bench.peer_gpu_engine import one_at_a_time

    rates, moved = one_at_a_time(engine, ROUNDS)
    for way, samples in rates.items():
        found = spread(samples)
        name = f"{way}-{tokens // 1024}k-tokens-{engine.shape.label}-peer"
        what = f"one {way} of {tokens} tokens, from the call to its completion"
        details = {"of_ceiling": round(found.p50 / ceiling[way], 4)}
        yield Cell(
            name=name, what=what, unit="GB/s", value=found.p50, spread=found, compared_bytes=moved, details=details
        )


def at_rest(work: Any) -> float:
    """Return what the work gets done alone."""
    import time

    work.switch(on=True)
    PAUSE.wait(SETTLE_S)
    began_s = time.monotonic()
    PAUSE.wait(ALONE_S)
    return work.rate(began_s, time.monotonic())


class Server:
    """The peer's server process."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Any) -> None:
        self._process, self._log = process, log
        self.url = f"tcp://127.0.0.1:{PORT}"

    def alive(self) -> None:
        """Raise if it has ended.

        Raises:
            Failure: it has.
        """
        if (code := self._process.poll()) is not None:
            raise Failure(f"the peer's server ended with code {code}:\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of its log."""
        self._log.seek(0)
        return self._log.read()[-6000:].decode(errors="replace")

    def native(self, site: Path) -> list[str]:
        """Return the peer's native libraries that are mapped in the server's process."""
        maps = Path(f"/proc/{self._process.pid}/maps").read_text().splitlines()
        return sorted({Path(line.split()[-1]).name for line in maps if f"{site.resolve()}/lmcache/" in line})


@contextlib.contextmanager
def peer_server(site: Path, l1_gib: int, *, rehearse: bool) -> Iterator[Server]:
    """Run the peer's server as it comes, but with this memory, all of it taken at once and none dropped by itself.

    Raises:
        Failure: it ended, or cannot be reached.
    """
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(PORT)]
    command += ["--l1-size-gb", str(l1_gib), "--l1-init-size-gb", str(l1_gib), "--eviction-policy", "LRU"]
    command += ["--eviction-trigger-watermark", "0.98"]
    command += ["--supported-transfer-mode", "auto"] if rehearse else []
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=quiet(site))
        server = Server(process, log)
        try:
            until_listening(server)
            yield server
        except (Failure, SystemExit):
            say(f"the end of the peer's log:\n{server.tail()}")
            raise
        finally:
            process.kill()
            process.wait()


def until_listening(server: Server) -> None:
    """Wait until something answers at the port."""
    for _ in range(int(UP_S * 10)):
        server.alive()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PORT), timeout=1.0):
            return
        PAUSE.wait(0.1)
    raise Failure(f"the peer's server does not listen after {UP_S:g} s")


def checked(site: Path) -> dict[str, Any]:
    """Return what is loaded of the peer's native extension.

    Raises:
        SystemExit: it cannot be loaded.
    """
    command = [sys.executable, str(ROOT / "tools" / "peer_gpu.py"), "check", "--site", str(site)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout)


def quiet(site: Path) -> dict[str, str]:
    """Return an environment in which the peer's packages come first and it tells nobody of its use."""
    quietly = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore"}
    return os.environ | quietly | {"PYTHONPATH": str(site.resolve())}


def gpu_name() -> str:
    """Return the device's name, if there is one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def say(text: str) -> None:
    """Tell the person who waits."""
    sys.stderr.write(f"peer_gpu: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    os._exit(ended)  # the adapters' threads would wait for their heartbeats
