# SPDX-License-Identifier: Apache-2.0
"""Why an engine's products lose while chunks move: the device's power, the gathers, or the launching thread.

    python -m tests.bench.product_losses [--run 32768] [--seconds 1.5] [--rounds 2] [--json FILE]

Products of random values draw all the power that a device may have, so whatever else it does costs them clock; products
of zeros draw less. Copies are measured with and without the kernels that gather and scatter (bytes are then wrong, and
compared only before and after, with kernels). *kernels*: what of the loss is in the products'
own time on the device; the rest are gaps between one batch and the next.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, NamedTuple
from unittest import mock

import torch

from kvpool.cli.bench import gpu_cells
from kvpool.cli.bench.command import write_report
from kvpool.cli.bench.gpu_ceiling import ceilings
from kvpool.cli.bench.gpu_engine import GpuEngine
from kvpool.cli.bench.gpu_rig import WAYS, Rig, note, ring_rig
from kvpool.cli.bench.gpu_work import Products
from kvpool.cli.bench.own_server import OwnServer
from kvpool.cli.bench.results import BenchReport, Cell
from kvpool.cli.machine import machine_facts
from kvpool.config import ServerConfig
from kvpool.transfer.cuda import Kernel

MEMORY = "/dev/shm"
L1_BYTES, JOB_BYTES = 8 << 30, 2 << 30
CHUNK_TOKENS = 256
SETTLE_S, ALONE_S = 0.4, 1.0
SAMPLE_MS = 20


class TimedProducts(Products):
    """Random products that also know what time each batch took on the device."""

    name = "random"

    def prepare(self) -> None:
        super().prepare()
        self.spans: list[tuple[float, float]] = []
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def launch(self) -> None:
        if self._done:
            self.spans.append((self._done[-1], self._marks[0].elapsed_time(self._marks[1]) / 1e3))
        self._marks[0].record()
        super().launch()
        self._marks[1].record()

    def device_s(self, began_s: float, ended_s: float) -> float:
        """Mean time of a batch on the device, between two times."""
        return statistics.mean(spent for at, spent in self.spans if began_s <= at <= ended_s)


class Zeros(TimedProducts):
    """The same work, of zeros: it takes far less power."""

    name = "zeros"

    def prepare(self) -> None:
        super().prepare()
        self._a.zero_()
        self._b.zero_()


class Window(NamedTuple):
    """What products did in a stretch of time."""

    began_s: float
    ended_s: float
    rate: float
    device_s: float


class Loss(NamedTuple):
    """One stretch with copies between two without."""

    gb_s: float
    with_copies: Window
    alone: tuple[Window, Window]
    compared: int
    """Bytes."""

    @property
    def percent(self) -> float:
        return 100 * (1 - self.with_copies.rate / statistics.mean(w.rate for w in self.alone))

    @property
    def in_kernels(self) -> float:
        return 100 * (1 - statistics.mean(w.device_s for w in self.alone) / self.with_copies.device_s)


class Sample(NamedTuple):
    """One reading of the device."""

    at_s: float
    mhz: float
    watts: float


@contextmanager
def sampled(folder: Path) -> Iterator[Callable[[], list[Sample]]]:
    """Read clock and power all the time, in a process of its own; what it yields returns the readings so far."""
    query = "--query-gpu=timestamp,clocks.sm,power.draw.instant"
    command = ["nvidia-smi", "-i", "0", query, "--format=csv,noheader,nounits", "-lms", str(SAMPLE_MS)]
    offset_s = time.monotonic() - datetime.now(UTC).timestamp()
    with (folder / "readings").open("w") as file, subprocess.Popen(command, stdout=file) as child:
        try:
            yield lambda: [*readings((folder / "readings").read_text(), offset_s)]
        finally:
            child.terminate()


def readings(text: str, offset_s: float) -> Iterator[Sample]:
    """Yield what was read; the last line may be cut."""
    for line in text.splitlines():
        try:
            at, mhz, watts = line.split(", ")
            local = datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").astimezone()
            yield Sample(local.timestamp() + offset_s, float(mhz), float(watts))
        except ValueError:
            continue


def window(work: TimedProducts, began_s: float, ended_s: float) -> Window:
    return Window(began_s, ended_s, work.rate(began_s, ended_s), work.device_s(began_s, ended_s))


def alone(work: TimedProducts) -> Window:
    Event().wait(SETTLE_S)
    began_s = time.monotonic()
    Event().wait(ALONE_S)
    return window(work, began_s, time.monotonic())


def launch_nothing(*_: object) -> None:
    """Stands in for a launch: what moves are copies alone."""


def lost(rig: Rig, engine: GpuEngine, work: TimedProducts, way: str, *, kernels: bool) -> Loss:
    """Measure one stretch; bytes are compared before and after."""
    known, before_bytes = gpu_cells.checked(engine)
    work.switch(on=True)
    before = alone(work)
    with nullcontext() if kernels else mock.patch.object(Kernel, "launch", launch_nothing):
        moved = gpu_cells.Flow(rig, engine, known).run(WAYS[way], rig.busy_seconds)
    during = window(work, moved.began_s + SETTLE_S, moved.ended_s)
    after = alone(work)
    work.switch(on=False)
    return Loss(moved.gb_s, during, (before, after), before_bytes + gpu_cells.checked(engine)[1])


def cell_of(values: str, moved: str, way: str, rounds: Sequence[Loss], samples: Sequence[Sample]) -> Cell:
    """Return the means of some stretches of one kind."""
    details = {"kernels": mean(loss.in_kernels for loss in rounds), "gb_s": mean(loss.gb_s for loss in rounds)}
    windows = {"alone": [w for loss in rounds for w in loss.alone], "with": [loss.with_copies for loss in rounds]}
    for label, spans in windows.items():
        inside = [s for s in samples for w in spans if w.began_s <= s.at_s <= w.ended_s]
        details |= {f"mhz_{label}": mean(s.mhz for s in inside), f"watts_{label}": mean(s.watts for s in inside)}
    return Cell(
        name=f"{values}-{moved.replace(' ', '-')}-{way}",
        what=f"products of {values} values beside {way}, {moved}",
        unit="%",
        value=mean(loss.percent for loss in rounds),
        compared_bytes=sum(loss.compared for loss in rounds),
        details=details,
    )


def mean(values: Iterator[float]) -> float:
    return round(statistics.mean(values), 2)


def shown(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a table."""
    columns = ("gb_s", "kernels", "mhz_alone", "mhz_with", "watts_alone", "watts_with")
    yield f"{'cell':32} {'lose, %':>8} " + " ".join(f"{c:>11}" for c in columns)
    for cell in cells:
        yield f"{cell.name:32} {cell.value:8.2f} " + " ".join(f"{cell.details[c]:11.1f}" for c in columns)


def measured(o: Any, folder: Path) -> Iterator[Cell]:
    """Run a server and an engine, and measure all kinds of stretches."""
    with ExitStack() as stack:
        torch.zeros(1, device="cuda")
        own = stack.enter_context(OwnServer(L1_BYTES, memory=MEMORY, config=ServerConfig(chunk_tokens=CHUNK_TOKENS)))
        rig = ring_rig(
            own,
            ceilings=ceilings(MEMORY),
            seconds=o.seconds,
            busy_seconds=o.seconds,
            job_bytes=JOB_BYTES,
            memory=MEMORY,
        )
        engine = stack.enter_context(gpu_cells.filled(rig, o.run))
        samples = stack.enter_context(sampled(folder))
        for kind in (TimedProducts, Zeros):
            with closing(kind()) as work:
                for way, kernels in itertools.product(WAYS, (True, False)):
                    rounds = [lost(rig, engine, work, way, kernels=kernels) for _ in range(o.rounds)]
                    cell = cell_of(work.name, "all" if kernels else "copies alone", way, rounds, samples())
                    note(f"{cell.name}: {', '.join(f'{loss.percent:.2f}' for loss in rounds)} %")
                    yield cell


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--run", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        cells = tuple(measured(o, Path(folder)))
    sys.stdout.writelines(f"{line}\n" for line in shown(cells))
    if o.json:
        options = {"run": o.run, "seconds": o.seconds, "rounds": o.rounds}
        report = BenchReport(bench="product-losses", cells=cells, options=options, machine=machine_facts())
        write_report(str(o.json), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
