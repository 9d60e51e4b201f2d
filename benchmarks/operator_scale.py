# SPDX-License-Identifier: Apache-2.0
"""The operator with 1,000 simulated nodes, 50 pools of 20 nodes and one of all, and 5,000 pods that opted in.

    python -m benchmarks.operator_scale [--json build/operator.json] && python benchmarks/judge.py build/operator.json

A real control plane runs beside it on this machine (tools/cluster_assets.py builds its programs once), so times say how
fast that is; writes are counted in the API server's audit log and do not depend on the machine.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.chart.rendering import Helm
from tests.cluster.scale import MIB, Outcome, Phase, Size, play, scale
from tools.cluster_assets import CONTROL_PLANE, assets

from kvpool.cli.bench.command import write_report
from kvpool.cli.bench.results import BenchReport, Cell
from kvpool.cli.machine import machine_facts

__all__ = ["cells", "main"]


def cells(found: Outcome, size: Size) -> tuple[Cell, ...]:
    """What *found* says, as cells; the bars of bench "operator" judge some of them."""
    servers = size.nodes + size.pools * size.nodes_each
    deletes = sum(p["delete pods"] for p in found.paced.writes.values())
    failed = sum(len(p.failures) + len(p.refused) for p in found.changes)
    return (
        Cell(name="converge-create", what=f"{servers} servers made", unit="s", value=found.create.seconds),
        *_change("rolling", found.rolling, "RollingUpdate"),
        *_change("paced", found.paced, "Paced"),
        Cell(name="deletes-over-servers", what="pods deleted by Paced", unit="deletes", value=deletes - servers),
        Cell(name="failed-passes", what="in both changes", unit="passes", value=failed),
        Cell(name="idle-writes", what="but the Lease's, at rest", unit="writes", value=len(found.idle_writes)),
        Cell(name="resident", what="of the operator at its peak", unit="MiB", value=found.peak_bytes / MIB),
    )


def _change(name: str, phase: Phase, strategy: str) -> tuple[Cell, ...]:
    most, pool = phase.most_writes
    pools = len(phase.writes)
    mean = sum(phase.writes_of(p) for p in phase.writes) / pools
    what = f"{strategy}, all pools at once"
    return (
        Cell(
            name=f"converge-{name}",
            what=f"{what}: spec to all servers ready and said so",
            unit="s",
            value=phase.seconds,
        ),
        Cell(
            name=f"writes-{name}",
            what=f"{what}: the most for any pool ({pool}); mean {mean:.1f}",
            unit="writes",
            value=most,
            details={what: float(count) for what, count in sorted(phase.writes[pool].items())},
        ),
        Cell(
            name=f"reads-{name}", what=f"{what}: gets and lists for each pool", unit="reads", value=phase.reads / pools
        ),
    )


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; writes JSON where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, too")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pools", type=int, default=50, help="pools that share the nodes; one more has all of them")
    parser.add_argument("--clients", type=int, default=5000, help="pods that opted in")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of rest in which writes are counted")
    options = parser.parse_args(argv)
    size = Size(options.nodes, options.pools, options.nodes // options.pools, options.clients)
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:6.0f} s  {text}", file=sys.stderr, flush=True)

    helm = Helm(assets(CONTROL_PLANE)["helm"])
    with scale(size, helm, KVPOOL_OPERATOR_RESYNC_S="30") as scene:
        say(f"{size.nodes} nodes are there")
        found = play(scene, options.idle, say)
    return _report(found, size, options)


def _report(found: Outcome, size: Size, options: argparse.Namespace) -> int:
    made = cells(found, size)
    for cell in made:
        print(f"{cell.name:22}{cell.value:10.1f}  {cell.unit:8}{cell.what}")
    for line in (*found.rolling.failures, *found.paced.failures, *found.idle_writes)[:10]:
        print(f"  {line}")
    if options.json:
        known = {"nodes": size.nodes, "pools": size.pools, "clients": size.clients, "idle_s": options.idle}
        report = BenchReport(bench="operator", cells=made, options=known, machine=machine_facts())
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_report(str(options.json), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
