# SPDX-License-Identifier: Apache-2.0
"""The fixed cost of a job that goes through the ring: what it takes beside the time that its bytes need on the link.

    python -m tests.bench.ring_job [--rounds 30] [--against FOLDER] [--json build/ring-job.json]

A real server, a real mover process and a client, on CPU. Kernels and copies are of a few bytes; the mover's device is
one of the tests, whose link is busy for 0.3 ms with each slot. A job has 64 slots' contents, as one of 2 GiB has on a
GPU, and 64 or 512 chunks. One request alone: from the client's call to its end, until the link is busy, from the moment
when all bytes were moved on, and how long the link was idle between these. Jobs in a row: one is always under way and
the next is asked for; the gap is the time that the link is idle between two. *against*: the folder ``cacheserver`` of
another checkout, whose fakes are used with it: both run all the time and are measured in turns, a few jobs each, and
the ratio is the median of what the rounds' medians give. All bytes are compared, before and after.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.ring_job_rig import COPY_S, ROOT, TURNS, new_keys, processor_s, running

import kvpool
from kvpool.cli.bench.command import write_report
from kvpool.cli.bench.results import BenchReport, Cell, spread, table
from kvpool.cli.machine import machine_facts
from kvpool.transfer.mover.messages import Direction

HERE = ROOT / "cacheserver"
CHUNKS = (64, 512)
DEPTH = 2
BYTES_S = TURNS * COPY_S
WHAT = {
    "fixed": "one {way} alone, from the call to its end, without the time of its bytes",
    "first": "of it until the link is busy",
    "last": "of it after the last byte",
    "idle": "of it with an idle link between these two",
    "gap": "{way}s in a row, idle link between two",
    "row-idle": "{way}s in a row, idle link for each, all in all",
    "client-cpu": "processor time of the client for each of them",
    "server-cpu": "of the server",
    "mover-cpu": "of the mover",
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=6, help="in each round, alone and in a row")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    o = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    if o.one:
        serve(int(o.one), o.jobs)
        return 0
    states = {"": HERE} | ({"former-": o.against.resolve()} if o.against else {})
    samples: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        children = {
            (label, chunks): stack.enter_context(Child(code, chunks, o.jobs))
            for chunks, (label, code) in itertools.product(CHUNKS, states.items())
        }
        for number in range(o.rounds):
            sys.stderr.write(f"bench ring-job: round {number + 1} of {o.rounds}\n")
            for (label, chunks), child in children.items():
                for name, values in child.measured("more").items():
                    samples.setdefault(f"{label}{name}-{chunks}", []).append(values)
        compared = sum(child.measured("end")["compared"] for child in children.values())
    cells = [*results(samples, compared)]
    sys.stdout.write(f"{table(cells)}\n")
    if o.json:
        options = {"rounds": o.rounds, "jobs": o.jobs, "moves": TURNS}
        report = BenchReport(bench="ring-job", cells=tuple(cells), options=options, machine=machine_facts())
        o.json.parent.mkdir(parents=True, exist_ok=True)
        write_report(str(o.json), report)
    return 0


class Child:
    """A state of kvpool, running and measured in processes of its own."""

    def __init__(self, code: Path, chunks: int, jobs: int) -> None:
        command = [sys.executable, "-m", "tests.bench.ring_job", "--one", str(chunks), "--jobs", str(jobs)]
        paths = (code, code.parent, ROOT, *filter(None, [os.environ.get("PYTHONPATH")]))
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=env, cwd=code.parent, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.communicate("")

    def measured(self, what: str) -> dict:
        """Ask for *more* samples, or for the *end*: how many bytes were compared."""
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline() or sys.exit("a process of the bench failed"))


def serve(chunks: int, jobs: int) -> None:
    """Write samples, in milliseconds by name, for each line that comes."""
    code = Path(kvpool.__path__[0]).parent
    with running(code, chunks) as (client, pids):
        compared = sum(client.checked() for _ in range(3))
        for line in sys.stdin:
            found: dict[str, Any] = {}
            if line == "end\n":
                found["compared"] = compared + client.checked()
            else:
                for way in Direction:
                    alone(client, way, jobs, found)
                    in_a_row(client, way, jobs, pids, found)
            sys.stdout.write(f"{json.dumps(found)}\n")
            sys.stdout.flush()


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
        parts = {"fixed": ended_s - called_s - BYTES_S, "first": first_s - called_s, "last": ended_s - last_s}
        for part, seconds in (parts | {"idle": last_s - first_s - BYTES_S}).items():
            found.setdefault(f"{way}-{part}", []).append(1e3 * seconds)


def in_a_row(client, way: Direction, jobs: int, pids: dict[str, int], found: dict[str, list[float]]) -> None:
    """One under way, the next one asked for."""
    keys = known(client)
    wanted = [one_more(client, way, keys) for _ in range(jobs)]
    before = {who: processor_s(pid) for who, pid in pids.items()} | {"client": time.process_time()}
    for place, one in enumerate(wanted):
        if place >= DEPTH:
            client.wait(wanted[place - DEPTH][0])
        client.begin(*one)
    for one in wanted:
        client.wait(one[0])
    after = {who: processor_s(pid) for who, pid in pids.items()} | {"client": time.process_time()}
    moves = client.moves(way, jobs)
    gaps = 1e3 * (moves[1:, :, 0].min(axis=1) - moves[:-1, :, 1].max(axis=1))
    found.setdefault(f"{way}-gap", []).extend(gaps.tolist())
    found.setdefault(f"{way}-row-idle", []).append(1e3 * (moves.max() - moves.min() - jobs * BYTES_S) / jobs)
    for who, seconds in after.items():
        found.setdefault(f"{way}-{who}-cpu", []).append(1e3 * (seconds - before[who]) / jobs)


def results(samples: dict[str, list[list[float]]], compared: int):
    """Yield cells for each thing, with the former state's and the ratio where there is one."""
    for way, chunks, (part, text) in itertools.product(Direction, CHUNKS, WHAT.items()):
        name = f"{way}-{part}-{chunks}"
        make = partial(Cell, compared_bytes=compared, what=text.format(way=way), unit="ms")
        rounds = {state: samples[f"{state}{name}"] for state in ("", "former-") if f"{state}{name}" in samples}
        for state, values in rounds.items():
            all_of_it = spread([*itertools.chain.from_iterable(values)])
            yield make(name=f"{state}{name}", value=all_of_it.p50, spread=all_of_it)
        if len(rounds) > 1:
            medians = zip(*(map(statistics.median, values) for values in rounds.values()), strict=True)
            if ratios := [now / former for now, former in medians if former]:
                yield make(name=f"{name}-ratio", value=statistics.median(ratios), unit="ratio")


if __name__ == "__main__":
    sys.exit(main())
