# SPDX-License-Identifier: Apache-2.0
"""The admission server at 50 pods a second: time of its answers, time of whole creations, memory.

    python -m benchmarks.webhook [--json build/webhook.json] && python benchmarks/judge.py build/webhook.json

A real API server calls two replicas behind what a Service does; the hooks are the chart's. Reviews are also sent
straight to one replica, over TLS and kept connections as the API server sends them, with the pods of the corpus, so
that its answer alone is timed; each answer's patch is compared with the golden one.
"""

import argparse
import asyncio
import base64
import itertools
import json
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from tests.cluster.conftest import NAMESPACES, Caller, connect, install_crd, make_namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.creating import Creator
from tests.cluster.webhooks import NAMESPACE, Deployment, Replica, deployment
from tests.unit.operator.wiring.corpus import Case, read

from kvpool.cli.bench.command import write_report
from kvpool.cli.bench.results import BenchReport, Cell, Spread, spread
from kvpool.cli.machine import machine_facts
from kvpool_operator.cluster import Cluster

__all__ = ["main"]

MIB = 1 << 20


@dataclass
class Found:
    """What was measured."""

    answers_s: list[float] = field(default_factory=list)
    wrong: int = 0
    compared_bytes: int = 0
    plain_s: list[float] = field(default_factory=list)
    hooked_s: list[float] = field(default_factory=list)
    lost: int = 0
    resident_bytes: int = 0
    start_s: float = 0.0


async def ask(replica: Replica, cases: Sequence[Case], rate: float, seconds: float, found: Found) -> None:
    """Send reviews at *rate* to one replica, whether or not the former ones were answered.

    Pools are unknown to it but by name, so the corpus' pods of such pools are those whose patches are golden.
    """
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE  # how long it takes, not whether it is trusted
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session, asyncio.TaskGroup() as tasks:
        due_s, end_s = loop.time(), loop.time() + seconds
        for case in itertools.cycle(cases):
            if due_s > end_s:
                return
            tasks.create_task(_one(session, replica, case, found))
            due_s += 1 / rate
            await asyncio.sleep(max(0.0, due_s - loop.time()))


async def _one(session: aiohttp.ClientSession, replica: Replica, case: Case, found: Found) -> None:
    request = {"uid": case.name, "namespace": "models", "operation": "CREATE", "object": case.pod}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    begun_s = time.perf_counter()
    async with session.post(f"https://127.0.0.1:{replica.port}/wire", json=review) as answer:
        body = await answer.read()
    found.answers_s.append(time.perf_counter() - begun_s)
    patch = base64.b64decode(json.loads(body)["response"].get("patch", ""))
    found.compared_bytes += len(patch)
    found.wrong += json.loads(patch or b"[]") != case.patch


def create(hooks: Deployment, rate: float, seconds: float, found: Found) -> None:
    """Create pods through the API server, first such that ask for nothing, then such that opted in."""
    namespace = make_namespace(hooks.api, "baseline")
    for opted_in, times in ((False, found.plain_s), (True, found.hooked_s)):
        with Creator(hooks.control_plane.admin, namespace, rate, opted_in=opted_in) as creator:
            time_is_up(seconds)
        times.extend(creator.tally.seconds)
        found.lost += len(creator.tally.refused) + (len(creator.tally.unwired) if opted_in else 0)


def time_is_up(seconds: float) -> None:
    """Let others work."""
    asyncio.run(asyncio.sleep(seconds))


def measure(rate: float, seconds: float) -> Found:
    """Everything on a control plane of its own."""
    found = Found()
    with ControlPlane() as control_plane, asyncio.Runner() as runner:
        client = runner.run(connect(control_plane.admin))
        api = Caller(runner, Cluster(client))
        install_crd(api)
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        api(api.cluster.create(NAMESPACES, "", body))
        with deployment(control_plane, api, control_plane.admin, timeout_s=5) as hooks:  # the chart's
            begun_s = time.perf_counter()
            first = hooks.add()
            found.start_s = time.perf_counter() - begun_s
            hooks.add()
            cases = [c for c in read() if c.pool in ("missing", "far-unknown")]
            runner.run(ask(first, cases, rate, seconds, found))
            create(hooks, rate, seconds, found)
            found.resident_bytes = max(replica.resident_bytes() for replica in hooks.balancer.replicas)
        runner.run(client.close())
    return found


def cells(found: Found) -> tuple[Cell, ...]:
    """What *found* says; the bars of bench "webhook" judge some of them."""

    def times(seconds: list[float]) -> Spread:
        return spread([s * 1000 for s in seconds])

    answers = times(found.answers_s)
    return (
        Cell(
            name="answer",
            what="one review over TLS, corpus of pods, patches compared",
            unit="ms",
            value=answers.p50,
            spread=answers,
            compared_bytes=found.compared_bytes,
        ),
        Cell(name="wrong-patches", what="of those", unit="patches", value=found.wrong),
        Cell(
            name="create-plain",
            what="a pod without the label, through the API server",
            unit="ms",
            value=times(found.plain_s).p50,
            spread=times(found.plain_s),
        ),
        Cell(
            name="create-wired",
            what="a pod with the label, through the API server",
            unit="ms",
            value=times(found.hooked_s).p50,
            spread=times(found.hooked_s),
        ),
        Cell(name="lost", what="pods refused or left unwired", unit="pods", value=found.lost),
        Cell(name="resident", what="of one replica at most", unit="MiB", value=found.resident_bytes / MIB),
        Cell(name="start", what="of a replica, to ready, certificates made", unit="s", value=found.start_s),
    )


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; writes JSON where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, too")
    parser.add_argument("--rate", type=float, default=50.0, help="pods a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the three phases")
    options = parser.parse_args(argv)
    made = cells(measure(options.rate, options.seconds))
    for cell in made:
        more = f"p90 {cell.spread.p90:.1f}, p99 {cell.spread.p99:.1f}" if cell.spread else ""
        print(f"{cell.name:15}{cell.value:10.2f}  {cell.unit:8}{more:24}{cell.what}")
    if options.json:
        known = {"rate": options.rate, "seconds": options.seconds}
        report = BenchReport(bench="webhook", cells=made, options=known, machine=machine_facts())
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_report(str(options.json), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
