# SPDX-License-Identifier: Apache-2.0
"""kvpool and its peer (LMCache's server of several processes) on the control plane, one beside the other in one run.

    python -m tests.bench.peer [--rounds 3] [--seconds 5] [--json build/peer.json]

Each round measures the peer, then kvpool, with the same number of tokens and clients; the table has the medians over
the rounds. The peer is driven through its own adapters (tests/bench/peer_client.py), kvpool by its own bench.
A cycle of kvpool's is lookup, plan of the load, free and end, each answered; one of the peer's is lookup, free and end,
the last two without an answer. ``python benchmarks/judge.py build/peer.json`` judges the ratio.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools import peer_env

from kvpool.cli.bench.command import write_report
from kvpool.cli.bench.results import BenchReport, Cell, spread, table
from kvpool.cli.machine import machine_facts

HERE = Path(__file__).resolve().parent
PORT = 5597
UP_S = 120.0


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    python = peer_env.environment()
    rounds = []
    for number in range(o.rounds):
        say(f"round {number + 1} of {o.rounds}")
        rounds.append((theirs(python, o), ours(o)))
    cells = [*compare(rounds)]
    sys.stdout.write(f"{table(cells)}\n")
    if o.json:
        options = {"tokens": o.tokens, "clients": o.clients, "seconds": o.seconds, "rounds": o.rounds}
        machine = machine_facts() | {"peer": f"lmcache {peer_env.VERSION}"}
        report = BenchReport(bench="peer", cells=tuple(cells), options=options, machine=machine)
        o.json.parent.mkdir(parents=True, exist_ok=True)
        write_report(str(o.json), report)
    return 0


def theirs(python: Path, o: argparse.Namespace) -> dict[str, Any]:
    """Return the peer's lookups, cycles and pings, in milliseconds and cycles a second."""
    with peer_server(python) as url:
        (alone,) = together(python, [order(url, "lookup", 0, o)])
        *loads, ping = together(
            python, [*(order(url, "cycle", n + 1, o) for n in range(o.clients)), order(url, "ping", 99, o)]
        )
    return {
        "lookup": alone["samples_ms"],
        "cycles": sum(load["cycles"] / load["seconds"] for load in loads),
        "ping": ping["samples_ms"],
        "compared": alone["compared_bytes"] + sum(load["compared_bytes"] for load in loads),
    }


def ours(o: argparse.Namespace) -> dict[str, Any]:
    """Return the same of kvpool, from its own bench."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        amount = ("--tokens", str(o.tokens), "--clients", str(o.clients), "--seconds", str(o.seconds))
        command = [sys.executable, "-m", "kvpool.cli.main", "bench", "control", "--cells", "lookup,load", *amount]
        subprocess.run(
            [*command, "--json", str(file)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        cells = {cell["name"]: cell for cell in json.loads(file.read_text())["cells"]}
    return {
        "lookup": cells["lookup"]["spread"],
        "first": cells["lookup-first-sight"]["spread"],
        "cycles": cells["cycles"]["value"],
        "ping": cells["ping-under-load"]["spread"],
        "compared": cells["lookup"]["compared_bytes"] + cells["cycles"]["compared_bytes"],
    }


def compare(rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[Cell]:
    """Yield the medians over the rounds and the ratios of those."""
    compared = sum(them["compared"] + us["compared"] for them, us in rounds)

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    def cell(name: str, what: str, unit: str, value: float) -> Cell:
        return Cell(name=name, what=what, unit=unit, value=value, compared_bytes=compared)

    for figure in ("p50", "p99"):
        for name, what in (("lookup", "lookup until its answer is known"), ("ping", "ping while the clients cycle")):
            them = median(getattr(spread(t[name]), figure) for t, _ in rounds)
            us = median(u[name][figure] for _, u in rounds)
            yield cell(f"{name}-peer-{figure}", what, "ms", them)
            yield cell(f"{name}-{figure}", what, "ms", us)
            yield cell(f"{name}-{figure}-ratio", "the peer's over kvpool's", "ratio", them / us)
    first = median(u["first"]["p50"] for _, u in rounds)
    yield cell(
        "lookup-first-sight-p50",
        "kvpool's lookup with hashing the tokens, which the peer does in its server",
        "ms",
        first,
    )
    them, us = median(t["cycles"] for t, _ in rounds), median(u["cycles"] for _, u in rounds)
    yield cell("cycles-peer", "lookup, free, end of all clients", "1/s", them)
    yield cell("cycles", "lookup, plan, free, end of all clients", "1/s", us)
    yield cell("cycles-ratio", "kvpool's over the peer's", "ratio", us / them)


@contextmanager
def peer_server(python: Path) -> Iterator[str]:
    """Run the peer's server as it comes, but with an arena that fits; yield where it listens."""
    with tempfile.TemporaryFile() as log:
        command = [str(python), "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(PORT)]
        sizes = ["--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"]
        server = subprocess.Popen(
            [*command, *sizes, "--supported-transfer-mode", "auto"], stdout=log, stderr=log, env=quiet()
        )
        try:
            yield f"tcp://127.0.0.1:{PORT}"
            if server.poll() is not None:
                log.seek(0)
                raise SystemExit(f"the peer's server ended:\n{log.read()[-2000:].decode(errors='replace')}")
        finally:
            server.kill()
            server.wait()


def order(url: str, work: str, number: int, o: argparse.Namespace) -> dict[str, Any]:
    """Return what one client of the peer is to do."""
    return {"url": url, "work": work, "number": number, "tokens": o.tokens, "seconds": o.seconds}


def together(python: Path, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run clients of the peer at the same time, from the moment when all are ready.

    Raises:
        SystemExit: one failed.
    """
    members = [start(python, wanted) for wanted in orders]
    try:
        for member in members:
            line(member)
        for member in members:
            member.stdin.write("go\n")
            member.stdin.flush()
        return [json.loads(line(member)) for member in members]
    finally:
        for member in members:
            member.kill()
            member.communicate()


def start(python: Path, wanted: dict[str, Any]) -> "subprocess.Popen[str]":
    """Start one client of the peer."""
    pipe = subprocess.PIPE
    command = [str(python), str(HERE / "peer_client.py"), json.dumps(wanted)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=quiet())


def line(member: "subprocess.Popen[str]") -> str:
    """Return the next line of a client.

    Raises:
        SystemExit: it ended instead.
    """
    text = member.stdout.readline()
    if not text:
        raise SystemExit(f"a client of the peer failed with code {member.wait()}")
    return text


def quiet() -> dict[str, str]:
    """Return an environment in which the peer tells nobody of its use."""
    return os.environ | {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def say(text: str) -> None:
    """Tell the person who waits."""
    sys.stderr.write(f"bench peer: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
