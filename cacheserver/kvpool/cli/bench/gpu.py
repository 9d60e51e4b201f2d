# SPDX-License-Identifier: Apache-2.0
"""`kvpool bench gpu`: what moves between a device and a server of its own, and what that costs the engine."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from kvpool.cli.bench.command import terminated_like_interrupted, write_report
from kvpool.cli.bench.gpu_devices import not_measured, together
from kvpool.cli.bench.gpu_rig import Rig
from kvpool.cli.bench.own_server import OwnServer
from kvpool.cli.bench.results import BenchReport, Cell, table
from kvpool.cli.errors import Failure, UsageError
from kvpool.cli.machine import machine_facts
from kvpool.cli.progress import progress
from kvpool.cli.settings import size
from kvpool.config import ServerConfig
from kvpool.model.identity import Mode
from kvpool.transfer.mover.inventory import InventoryError, visible_gpus

__all__ = ["run"]

CELLS: Final = ("idle", "products", "copies", "sizes", "first-byte", "modes", "gpus")
_SIZES: Final = ((32768, 4096), (32768, 16384), (4096, 131072))
"""Run and tokens: 512 MiB, 2 GiB and 2 GiB."""

_COPY_RUNS: Final = (32768, 4096)
_GPUS_RUNS: Final = (32768, 4096)
_SEVERAL: Final = 2
_MODE_RUN: Final = 32768
_FIRST_RUN: Final = 4096
_CHUNK_TOKENS: Final = 256


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        UsageError: an option is out of range.
        Failure: there is no device, the server failed, or bytes were wrong: then no number is printed.
    """
    names = _names(args.cells)
    runs = [int(size("--runs", text)) for text in args.runs.split(",")]
    try:
        devices = visible_gpus()
    except InventoryError as e:
        raise Failure(str(e)) from e
    if not devices:
        raise Failure("no CUDA device is visible")
    memory = args.directory or "/dev/shm"  # noqa: S108
    config = ServerConfig(chunk_tokens=_CHUNK_TOKENS)
    with terminated_like_interrupted(), OwnServer(size("--l1", args.l1), memory=memory, config=config) as own:
        found = list(_measured(args, names, runs, own, memory))
    print(table(found))
    if args.json:
        shown: dict[str, Any] = {"runs": args.runs, "l1": args.l1, "job": args.job}
        facts = machine_facts() | {"gpus": [msgspec.to_builtins(d.name) for d in devices]}
        write_report(args.json, BenchReport(bench="gpu", cells=tuple(found), options=shown, machine=facts))
    return 0


def _measured(
    args: argparse.Namespace, names: list[str], runs: list[int], own: OwnServer, memory: str
) -> Iterator[Cell]:
    import torch  # noqa: PLC0415 - only where there is a device

    from kvpool.cli.bench import gpu_cells as cells  # noqa: PLC0415
    from kvpool.cli.bench.gpu_ceiling import ceilings  # noqa: PLC0415

    torch.zeros(1, device="cuda")
    best = ceilings(memory)
    rig = Rig(
        config=msgspec.structs.replace(own.client, modes=(Mode.RING,), transfer_s=60.0),
        server_pid=own.pid,
        chunk_tokens=_CHUNK_TOKENS,
        ceilings=best,
        seconds=args.seconds,
        busy_seconds=args.busy_seconds,
        job_bytes=size("--job", args.job),
        l1_bytes=own.config.l1.size_bytes,
        memory=memory,
    )
    cells.warm(rig, _FIRST_RUN)
    compared = 0
    for name in names:
        with progress(f"bench gpu: {name}"):
            made = _of_one_name(rig, name, runs)
        compared += sum(cell.compared_bytes for cell in made)
        torch.cuda.empty_cache()
        yield from made
    for way, rate in best.items():
        what = f"copies of 1 GiB between the device and registered shared memory, {way}"
        yield Cell(name=f"ceiling-{way}", what=what, unit="GB/s", value=round(rate, 2), compared_bytes=compared)


def _of_one_name(rig: Rig, name: str, runs: list[int]) -> list[Cell]:
    import torch  # noqa: PLC0415 - only where there is a device

    from kvpool.cli.bench import gpu_cells as cells  # noqa: PLC0415
    from kvpool.cli.bench.gpu_first_byte import first_byte  # noqa: PLC0415
    from kvpool.cli.bench.gpu_work import Copies, Products, Work  # noqa: PLC0415

    def beside(kind: type[Work], wanted: Sequence[int]) -> list[Cell]:
        with contextlib.closing(kind()) as work:
            return [cell for r in wanted for cell in cells.moving(rig, r, work)]

    def on_all() -> list[Cell]:
        if (count := torch.cuda.device_count()) >= _SEVERAL:
            return [cell for r in _GPUS_RUNS for cell in together(rig, r, count)]
        why = f"it needs {_SEVERAL} CUDA devices, and {count} is visible"
        return [cell for r in _GPUS_RUNS for cell in not_measured(r, why)]

    makers: dict[str, Callable[[], list[Cell]]] = {
        "idle": lambda: [cell for r in runs for cell in cells.moving(rig, r)],
        "products": lambda: beside(Products, runs),
        "copies": lambda: beside(Copies, _COPY_RUNS),
        "sizes": lambda: [cell for r, tokens in _SIZES for cell in cells.sizes(rig, r, tokens)],
        "first-byte": lambda: first_byte(rig, _FIRST_RUN),
        "modes": lambda: cells.modes(rig, _MODE_RUN),
        "gpus": on_all,
    }
    return makers[name]()


def _names(given: str | None) -> list[str]:
    names = given.split(",") if given else list(CELLS)
    if unknown := [n for n in names if n not in CELLS]:
        raise UsageError(f"--cells: no cell is called {', '.join(unknown)}; there are {', '.join(CELLS)}")
    return names
