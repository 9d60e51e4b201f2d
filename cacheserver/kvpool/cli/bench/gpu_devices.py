# SPDX-License-Identifier: Apache-2.0
"""Engines on several GPUs at one server, as workers in tensor parallel are: a process, a device and a mover for each.

This half is the bench's own: it says what all of them, or one alone, do next. ``gpu_child`` is the engine's.
"""

import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from typing import Final, Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvpool.cli.bench.gpu_rig import WAYS, Rig, WrongBytesError, note, run_name
from kvpool.cli.bench.results import Cell
from kvpool.cli.errors import Failure

__all__ = ["COMMAND", "Order", "Setup", "Told", "What", "not_measured", "together"]

COMMAND: Final = (sys.executable, "-m", "kvpool.cli.bench.gpu_child")
_ANSWER_S: Final = 120.0
_END_S: Final = 30.0
_JOBS: Final = 8
"""Jobs of each engine that L1 must have room for: what is known, two stores and two loads under way, and what they
drive out."""


class Setup(Struct, frozen=True, kw_only=True):
    """The first thing that an engine's process is told."""

    rig: Rig
    device: int
    """Number of its GPU among those that are visible."""


class What(StrEnum):
    """What an engine can do."""

    OPEN = "open"
    """Make a cache with blocks of that run, and connect; leave the server before, if it is connected."""

    CHECK = "check"
    """Store, load into poisoned blocks, compare."""

    MOVE = "move"
    """Keep moves under way for the rig's time."""

    COPY = "copy"
    """Plain copies over its link."""


class Order(Struct, frozen=True, kw_only=True):
    """What it does next."""

    what: What
    way: str = "both"
    run: int = 0


class Told(Struct, frozen=True, kw_only=True):
    """What came of it; the first one says that the process has its device."""

    moved_bytes: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    """By the machine's monotonic clock, which all processes share."""

    compared_bytes: int = 0
    problem: str = ""
    wrong: bool = False
    """True if the problem is bytes that are not those that were stored."""

    @property
    def gb_s(self) -> float:
        """How fast."""
        return self.moved_bytes / (self.ended_s - self.began_s) / 1e9


class _Engine:
    """One engine's process; a context manager."""

    def __init__(self, setup: Setup, command: Sequence[str]) -> None:
        self._number = setup.device
        self._child = subprocess.Popen(  # noqa: S603 - our own program
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, process_group=0
        )
        self._tell(setup)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let it end; kill it if it does not."""
        assert self._child.stdout is not None
        self.leave()
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()

    def leave(self) -> None:
        """Tell it to end, and do not wait for that."""
        assert self._child.stdin is not None
        self._child.stdin.close()

    def ask(self, order: Order) -> None:
        """Let it begin; one order at a time."""
        self._tell(order)

    def told(self) -> Told:
        """Wait for its answer.

        Raises:
            Failure: it failed, ended, or does not answer.
            WrongBytesError: bytes are not those that were stored.
        """
        out = self._child.stdout
        assert out is not None
        name = f"the engine of GPU {self._number}"
        if not select.select([out], [], [], _ANSWER_S)[0]:
            raise Failure(f"{name} did not answer within {_ANSWER_S:.0f} s")
        line = out.readline()
        if not line:
            raise Failure(f"{name} ended; its last words are above")
        found = msgspec.json.decode(line, type=Told)
        if found.problem:
            raise (WrongBytesError if found.wrong else Failure)(f"{name}: {found.problem}")
        return found

    def _tell(self, what: Setup | Order) -> None:
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # what it said before it ended is found by ``told``
            self._child.stdin.write(msgspec.json.encode(what) + b"\n")


class _Engines:
    """All of them."""

    def __init__(self, engines: Sequence[_Engine]) -> None:
        self._engines = engines
        self.compared_bytes = 0

    def leave(self) -> None:
        """Tell all to end, so that each one does while another one is waited for."""
        for engine in self._engines:
            engine.leave()

    def all(self, order: Order | None) -> list[Told]:
        """Let all do the same at the same time; None: they begin by themselves."""
        return self._told(self._engines, order)

    def each(self, *orders: Order) -> list[Told]:
        """Let one after the other do it, while the others do nothing; returns what came of the last order."""
        return [[self._told([engine], order) for order in orders][-1][0] for engine in self._engines]

    def _told(self, engines: Sequence[_Engine], order: Order | None) -> list[Told]:
        if order is not None:
            for engine in engines:
                engine.ask(order)
        found = [engine.told() for engine in engines]
        self.compared_bytes += sum(told.compared_bytes for told in found)
        return found


def together(
    rig: Rig,
    runs: Sequence[int],
    devices: int,
    command: Sequence[str] = COMMAND,
    settle: Callable[[], object] = lambda: None,
) -> Iterator[Cell]:
    """Store, load and both at once on all *devices* at the same time, beside all links at once and each engine alone.

    Jobs are smaller than the rig's if L1 has no room for those of all engines. A cell comes as soon as bytes were
    compared behind it, too.

    Args:
        rig: see Rig.
        runs: bytes that lie together in a block, one after the other with the same processes.
        devices: how many.
        command: what runs an engine's process.
        settle: what to wait for while the processes start.

    Raises:
        Failure: an engine failed, or bytes were wrong.
    """
    fit = replace(rig, job_bytes=min(rig.job_bytes, rig.l1_bytes // (_JOBS * devices)))
    with ExitStack() as stack:
        setups = [Setup(rig=fit, device=number) for number in range(devices)]
        engines = _Engines([stack.enter_context(_Engine(setup, command)) for setup in setups])
        stack.callback(engines.leave)
        settle()
        engines.all(None)
        note(f"gpus: {devices} processes have their devices")
        for run in runs:
            yield from _of_run(engines, run)


def _of_run(engines: _Engines, run: int) -> Iterator[Cell]:
    check = Order(what=What.CHECK)
    engines.all(Order(what=What.OPEN, run=run))
    engines.all(check)
    note(f"gpus: engines with runs of {run_name(run)} are connected")
    engines.all(Order(what=What.MOVE))  # nothing is measured in memory that a mover has not registered yet
    waiting: list[Cell] = []
    for way in WAYS:
        move = Order(what=What.MOVE, way=way)
        links = engines.all(Order(what=What.COPY, way=way))
        alone = engines.each(check, move)
        yield from _with_bytes(waiting, engines)
        engines.all(check)
        waiting = _cells(f"{way}-{run_name(run)}", links, alone, engines.all(move))
    engines.all(check)
    yield from _with_bytes(waiting, engines)


def _with_bytes(cells: Sequence[Cell], engines: _Engines) -> Iterator[Cell]:
    return (replace(cell, compared_bytes=engines.compared_bytes) for cell in cells)


def not_measured(run: int, why: str) -> list[Cell]:
    """Return the cells that would have been measured."""
    return [Cell(name=f"gpus-{way}-{run_name(run)}", what="", unit="of ceiling", skipped=why) for way in WAYS]


def _cells(name: str, links: Sequence[Told], alone: Sequence[Told], moved: Sequence[Told]) -> list[Cell]:
    count = len(moved)
    best, rate, by_one = _at_once(links), _at_once(moved), sum(told.gb_s for told in alone)
    details = {"gpus": float(count), "gb_s": round(rate, 2)}
    for number, (link, lone, told) in enumerate(zip(links, alone, moved, strict=True)):
        found = {"": told, "_alone": lone, "_link": link}
        details |= {f"gpu{number}{kind}_gb_s": round(one.gb_s, 2) for kind, one in found.items()}
    where = f"on {count} GPUs at once"
    shown = [
        (f"gpus-{name}", f"{where}, end to end, of all their links at once", "of ceiling", rate / best, details),
        (f"gpus-of-alone-{name}", f"{where}, of the sum of each engine alone", "of alone", rate / by_one, {}),
        (f"gpus-ceiling-{name}", f"plain copies {where}", "GB/s", best, {}),
    ]
    return [
        Cell(name=cell, what=what, unit=unit, value=round(value, 4), details=more)
        for cell, what, unit, value, more in shown
    ]


def _at_once(told: Sequence[Told]) -> float:
    """GB/s of all: from the first one's begin to the last one's end."""
    spent_s = max(one.ended_s for one in told) - min(one.began_s for one in told)
    return sum(one.moved_bytes for one in told) / spent_s / 1e9
