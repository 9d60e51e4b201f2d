# SPDX-License-Identifier: Apache-2.0
"""`kvpool bench gpu`: what moves between a device and a server of its own, and what that costs the engine."""

import argparse
import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import msgspec

from kvpool.cli.bench.command import terminated_like_interrupted
from kvpool.cli.bench.gpu_devices import not_measured, together
from kvpool.cli.bench.gpu_kept import Kept
from kvpool.cli.bench.gpu_rig import Rig, note, ring_rig
from kvpool.cli.bench.own_server import OwnServer
from kvpool.cli.bench.results import BenchReport, Cell
from kvpool.cli.errors import Failure, UsageError
from kvpool.cli.machine import machine_facts
from kvpool.cli.settings import size
from kvpool.config import ServerConfig
from kvpool.transfer.mover.inventory import InventoryError, visible_gpus

__all__ = ["run"]

Found = Generator[Cell, None, None]

_ON_ALL: Final = "gpus"
CELLS: Final = ("idle", "products", "copies", "sizes", "first-byte", "modes", _ON_ALL)
_SIZES: Final = ((32768, 4096), (32768, 16384), (4096, 131072))
"""Run and tokens: 512 MiB, 2 GiB and 2 GiB."""

_COPY_RUNS: Final = (32768, 4096)
_GPUS_RUNS: Final = (32768, 4096)
_SEVERAL: Final = 2
_MODE_RUN: Final = 32768
_FIRST_RUN: Final = 4096
_CHUNK_TOKENS: Final = 256


def run(args: argparse.Namespace) -> int:
    """Measure and print; whatever ends it, what was measured until then is printed and written.

    Raises:
        UsageError: an option is out of range.
        Failure: there is no device, or something failed.
        WrongBytesError: bytes were wrong: then there is no table and no report.
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
    shown: dict[str, Any] = {"runs": args.runs, "l1": args.l1, "job": args.job}
    facts = machine_facts() | {"gpus": [msgspec.to_builtins(d.name) for d in devices]}
    kept = Kept(BenchReport(bench="gpu", cells=(), options=shown, machine=facts), args.json)
    with (
        terminated_like_interrupted(),
        OwnServer(size("--l1", args.l1), memory=memory, config=config) as own,
        contextlib.closing(_measured(args, names, runs, own, memory)) as found,
        kept.whatever_ends(),
    ):
        for cell in found:
            kept.add(cell)
    return 0


def _measured(args: argparse.Namespace, names: list[str], runs: list[int], own: OwnServer, memory: str) -> Found:
    import torch  # noqa: PLC0415 - only where there is a device

    from kvpool.cli.bench import gpu_cells as cells  # noqa: PLC0415
    from kvpool.cli.bench.gpu_ceiling import ceilings  # noqa: PLC0415

    torch.zeros(1, device="cuda")
    note("the server listens, and the device is in use")
    beside_it = set(names) != {_ON_ALL}  # engines on all devices copy over their own links
    best = ceilings(memory) if beside_it else {}
    rig = ring_rig(
        own,
        ceilings=best,
        seconds=args.seconds,
        busy_seconds=args.busy_seconds,
        job_bytes=size("--job", args.job),
        memory=memory,
    )
    if beside_it:
        note("the link's best is known")
        cells.warm(rig, _FIRST_RUN)
    for name in names:
        began_s = time.monotonic()
        with contextlib.closing(_of_one_name(rig, name, runs, own)) as found:
            for cell in found:
                yield cell
                if cell.compared_bytes:
                    yield from _ceilings(best, cell.compared_bytes)
                    best = {}
        torch.cuda.empty_cache()
        note(f"{name}: took {time.monotonic() - began_s:.1f} s")


def _ceilings(best: dict[str, float], compared: int) -> Found:
    for way, rate in best.items():
        what = f"copies of 1 GiB between the device and registered shared memory, {way}"
        yield Cell(name=f"ceiling-{way}", what=what, unit="GB/s", value=round(rate, 2), compared_bytes=compared)


def _of_one_name(rig: Rig, name: str, runs: list[int], own: OwnServer) -> Found:
    import torch  # noqa: PLC0415 - only where there is a device

    from kvpool.cli.bench import gpu_cells as cells  # noqa: PLC0415
    from kvpool.cli.bench.gpu_first_byte import first_byte  # noqa: PLC0415
    from kvpool.cli.bench.gpu_work import Copies, Products, Work  # noqa: PLC0415

    def idle() -> Found:
        for run in runs:
            yield from cells.moving(rig, run)

    def beside(kind: type[Work], wanted: Sequence[int]) -> Found:
        with contextlib.closing(kind()) as work:
            for run in wanted:
                yield from cells.moving(rig, run, work)

    def alone() -> Found:
        for run, tokens in _SIZES:
            yield from cells.sizes(rig, run, tokens)

    def waits() -> Found:
        yield from first_byte(rig, _FIRST_RUN)

    makers: dict[str, Callable[[], Found]] = {
        "idle": idle,
        "products": lambda: beside(Products, runs),
        "copies": lambda: beside(Copies, _COPY_RUNS),
        "sizes": alone,
        "first-byte": waits,
        "modes": lambda: cells.modes(rig, _MODE_RUN),
        _ON_ALL: lambda: _on_all(rig, torch.cuda.device_count(), own),
    }
    return makers[name]()


def _on_all(rig: Rig, count: int, own: OwnServer) -> Found:
    if count >= _SEVERAL:
        yield from together(rig, _GPUS_RUNS, count, settle=own.settle)
        return
    why = f"it needs {_SEVERAL} CUDA devices, and {count} is visible"
    for run in _GPUS_RUNS:
        yield from not_measured(run, why)


def _names(given: str | None) -> list[str]:
    names = given.split(",") if given else list(CELLS)
    if unknown := [n for n in names if n not in CELLS]:
        raise UsageError(f"--cells: no cell is called {', '.join(unknown)}; there are {', '.join(CELLS)}")
    return names
