# SPDX-License-Identifier: Apache-2.0
"""The fixed cost of a job that goes through the ring: what is left when kernels and copies are of a few bytes.

    python -m tests.bench.ring_job [--rounds 5] [--against FOLDER] [--json build/ring-job.json]

A real server, a real mover process with a device of the tests and a client, on CPU. A job has 64 moves, as one of
2 GiB has on a GPU, and 64 or 512 chunks. One request alone: from the client's call to its end, to the first move in the
mover, and from the last move's end to the end that counts. Jobs in a row: one is always under way and the next is asked
for; the gap is from the last move's end of one to the first move of the next. *against*: the folder ``cacheserver`` of
another state of kvpool; both are measured in turns, and the ratios stand in the table. All bytes are compared, before
and after.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
from tests.bench.ring_job_rig import ROOT, TURNS, new_keys, processor_s, running

import kvpool
from kvpool.cli.bench.results import BenchReport, Cell, spread, table
from kvpool.cli.machine import machine_facts
from kvpool.transfer.mover.messages import Direction

HERE = ROOT / "cacheserver"
CHUNKS = (64, 512)
DEPTH = 2
WHAT = {
    "total": "one {way} alone, from the call to its end",
    "first": "of it until its first move is in the mover",
    "last": "of it from the last move's end on",
    "moves": "of it between these two",
    "gap": "{way}s in a row, from one's last move to the next one's first",
    "each": "{way}s in a row, time for each",
    "client-cpu": "processor time in the client, {way}s in a row",
    "server-cpu": "in the server",
    "mover-cpu": "in the mover",
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=40, help="in each round, alone and in a row")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    o = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    if o.one:
        sys.stdout.write(json.dumps({chunks: measured(o.one, chunks, o.jobs) for chunks in CHUNKS}))
        return 0
    states = {"": HERE} | ({"former-": o.against.resolve()} if o.against else {})
    samples: dict[str, list[float]] = {}
    compared = 0
    for number in range(o.rounds):
        for label, code in states.items():
            sys.stderr.write(f"bench ring-job: round {number + 1} of {o.rounds}, {code}\n")
            for chunks, found in child(code, o.jobs).items():
                compared += found.pop("compared")
                for name, values in found.items():
                    samples.setdefault(f"{label}{name}-{chunks}", []).extend(values)
    cells = [*results(samples, compared)]
    sys.stdout.write(f"{table(cells)}\n")
    if o.json:
        options = {"rounds": o.rounds, "jobs": o.jobs, "moves": TURNS}
        report = BenchReport(bench="ring-job", cells=tuple(cells), options=options, machine=machine_facts())
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps(msgspec.to_builtins(report), indent=2) + "\n")
    return 0


def child(code: Path, jobs: int) -> dict:
    """Measure the kvpool in *code* in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.ring_job", "--one", str(code), "--jobs", str(jobs)]
    env = os.environ | {"PYTHONPATH": str(code)}
    return json.loads(subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)


def measured(code: Path, chunks: int, jobs: int) -> dict:
    """Return samples in milliseconds by name, and how many bytes were compared."""
    assert Path(kvpool.__path__[0]).parent == code
    with running(code, chunks) as (client, pids):
        for _ in range(3):
            compared = client.checked()
        found: dict[str, list[float]] = {}
        for way in Direction:
            alone(client, way, jobs, found)
            in_a_row(client, way, jobs, pids, found)
        compared += client.checked()
    return found | {"compared": compared}


def known(client) -> bytes:
    """Store a prompt; return its keys."""
    keys, name = new_keys(client.chunks)
    client.begin(name, keys)
    client.wait(name)
    client.moves(Direction.STORE)
    return keys


def one_more(client, way: Direction, keys: bytes):
    """Return what ``Client.begin`` takes for a store of new keys, or for a load of *keys*."""
    if way is Direction.STORE:
        keys, name = new_keys(client.chunks)
        return name, keys, None
    name = new_keys(1)[1]
    return name, keys, client.found(name, keys)


def alone(client, way: Direction, jobs: int, found: dict[str, list[float]]) -> None:
    """One request at a time."""
    keys = known(client)
    for _ in range(jobs):
        name, wanted, answer = one_more(client, way, keys)
        called_s = time.monotonic()
        client.begin(name, wanted, answer)
        ended_s = client.wait(name)
        moves = client.moves(way)[0]
        first_s, last_s = moves[:, 0].min(), moves[:, 1].max()
        parts = {"total": ended_s - called_s, "first": first_s - called_s, "last": ended_s - last_s}
        for part, seconds in (parts | {"moves": last_s - first_s}).items():
            found.setdefault(f"{way}-{part}", []).append(1e3 * seconds)


def in_a_row(client, way: Direction, jobs: int, pids: dict[str, int], found: dict[str, list[float]]) -> None:
    """One under way, the next one asked for."""
    keys = known(client)
    wanted = [one_more(client, way, keys) for _ in range(jobs)]
    before = {who: processor_s(pid) for who, pid in pids.items()} | {"client": time.process_time()}
    began_s = time.monotonic()
    for place, one in enumerate(wanted):
        if place >= DEPTH:
            client.wait(wanted[place - DEPTH][0])
        client.begin(*one)
    for one in wanted:
        client.wait(one[0])
    each_s = (time.monotonic() - began_s) / jobs
    after = {who: processor_s(pid) for who, pid in pids.items()} | {"client": time.process_time()}
    moves = client.moves(way, jobs)
    gaps = 1e3 * (moves[1:, :, 0].min(axis=1) - moves[:-1, :, 1].max(axis=1))
    found.setdefault(f"{way}-gap", []).extend(gaps.tolist())
    found.setdefault(f"{way}-each", []).append(1e3 * each_s)
    for who, seconds in after.items():
        found.setdefault(f"{way}-{who}-cpu", []).append(1e3 * (seconds - before[who]) / jobs)


def results(samples: dict[str, list[float]], compared: int):
    """Yield a cell for each thing, with the former state's and the ratio of the medians where there is one."""
    for way, chunks, (part, text) in itertools.product(Direction, CHUNKS, WHAT.items()):
        name = f"{way}-{part}-{chunks}"
        make = partial(Cell, compared_bytes=compared, what=text.format(way=way), unit="ms")
        now = spread(samples[name])
        yield make(name=name, value=now.p50, spread=now)
        if before := samples.get(f"former-{name}"):
            former = spread(before)
            yield make(name=f"{name}-former", value=former.p50, spread=former)
            yield make(name=f"{name}-ratio", value=now.p50 / former.p50, unit="ratio")


if __name__ == "__main__":
    sys.exit(main())
