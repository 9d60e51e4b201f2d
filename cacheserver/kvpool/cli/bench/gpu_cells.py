# SPDX-License-Identifier: Apache-2.0
"""The cells of `kvpool bench gpu`: what moves, end to end from the client's call, and what that costs the engine."""

import os
import statistics
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kvpool.cli.bench.gpu_engine import BLOCK_TOKENS, PLANES, Cache, GpuEngine, NotReadyError, Request
from kvpool.cli.bench.gpu_rig import WAYS, Rig, Ways, WrongBytesError, note, run_name
from kvpool.cli.bench.gpu_work import Products, Work
from kvpool.cli.bench.own_server import OwnServer
from kvpool.cli.bench.results import Cell, spread
from kvpool.cli.errors import Failure
from kvpool.config import ServerConfig
from kvpool.model.identity import Mode

__all__ = ["Flow", "Moved", "checked", "engine_for", "filled", "modes", "moving", "sizes", "warm"]

_SETTLE_S: Final = 0.4
_ALONE_S: Final = 1.2
_ROUNDS: Final = 12
_DEPTH: Final = 2
_TICK: Final = os.sysconf("SC_CLK_TCK")
_SLOW_JOB: Final = 1 << 28
_SLOW_L1: Final = 8 * _SLOW_JOB
"""The ways without a mover move 1 to 8 GB/s: a server and jobs of their own size."""

_FILLS: Final = {Mode.MAPPED: 1, Mode.CLIENT_MOVED: 2}
"""How often the memory is filled first. A client that maps it takes new memory at the first time, and locks its pages
while it stores."""

_SMALL_RUN: Final = 4096


_ONE_WAY: Final = {way: WAYS[way] for way in ("store", "load")}

Found = Generator[Cell, None, None]


class Moved(Struct):
    """What one measurement moved."""

    bytes_moved: int
    began_s: float
    ended_s: float
    engine_cpu_s: float
    server_cpu_s: float

    @property
    def gb_s(self) -> float:
        """How fast."""
        return self.bytes_moved / (self.ended_s - self.began_s) / 1e9

    def cpu(self) -> dict[str, float]:
        """CPU time of the engine's own threads and of the server's side, as a cell's details."""
        gib = self.bytes_moved / (1 << 30)
        return {
            "engine_cpu_ms_per_gib": round(1e3 * self.engine_cpu_s / gib, 2),
            "server_cpu_ms_per_gib": round(1e3 * self.server_cpu_s / gib, 2),
        }


class Flow:
    """Keeps a store and a load under way, each with the next one asked for already."""

    def __init__(self, rig: Rig, engine: GpuEngine, known: Request) -> None:
        self._rig, self._engine, self._known = rig, engine, known

    def run(self, ways: tuple[bool, bool], seconds: float) -> Moved:
        """Move for some time, to the end of what was begun."""
        engine, cache = self._engine, self._engine.cache
        size = self._known.chunks * cache.chunk_bytes
        cpu = _cpu(self._rig.server_pid)
        began_s = time.monotonic()
        ends_s, moved, running = began_s + seconds, 0, 0
        for is_load in [n for n, wanted in enumerate(ways) if wanted] * _DEPTH:
            self._begin(is_load=bool(is_load))
            running += 1
        while running:
            stored, loaded = engine.ended()
            if any(loaded.values()):
                raise Failure("a load of the bench failed")
            for is_load in [*(False for _ in stored), *(True for _ in loaded)]:
                moved += size
                if time.monotonic() < ends_s:
                    self._begin(is_load=is_load)
                else:
                    running -= 1
        ended_s = time.monotonic()
        after = _cpu(self._rig.server_pid)
        lost = engine.worker.counters()
        if lost.get("chunks_store_lost") or any(name.startswith("stores_dropped") for name in lost):
            raise Failure(f"a store of the bench was not kept: {engine.told()}")
        return Moved(moved, began_s, ended_s, after[0] - cpu[0], after[1] - cpu[1])

    def _begin(self, *, is_load: bool) -> None:
        if not is_load:
            self._engine.store(Request(self._known.chunks))
            return
        again = Request(self._known.chunks)
        again.keys = self._known.keys
        self._engine.load(again, self._engine.found(again))


def moving(rig: Rig, run: int, work: Work | None = None) -> Found:
    """Store, load and both at once with runs of *run* bytes; idle, or while *work* keeps the device busy."""
    with filled(rig, run) as engine:
        note(f"an engine with runs of {run_name(run)} is connected")
        yield from _moved(rig, engine, work, WAYS)


def _moved(rig: Rig, engine: GpuEngine, work: Work | None, ways: Ways) -> Found:
    """Yield each way's cells as soon as bytes were compared before it and behind it."""
    waiting: list[Cell] = []
    compared, before = 0, _alone(work)
    for way, kinds in ways.items():
        # Each time anew: what the stores of a cell bring drives out what was there before.
        known, more = checked(engine)
        compared += more
        yield from _with_bytes(waiting, compared)
        label = run_name(engine.cache.run)
        name = f"{way}-{label}" if work is None else f"{way}-{label}-{type(work).__name__.lower()}"
        if work is not None:
            work.switch(on=True)
            threading.Event().wait(_SETTLE_S)
        moved = Flow(rig, engine, known).run(kinds, rig.busy_seconds if work else rig.seconds)
        share = moved.gb_s / rig.ceilings[way]
        details = {"gb_s": round(moved.gb_s, 2), **moved.cpu()}
        what = f"{way}, end to end, runs of {label}, {'idle' if work is None else type(work).__name__}"
        waiting = [_cell(name, what, "of ceiling", share, details)]
        if work is not None:
            busy, after = work.rate(moved.began_s + _SETTLE_S / 2, moved.ended_s), _alone(work)
            alone, before = statistics.mean((before, after)), after
            loss = 100 * (1 - busy / alone)
            details = {"alone": round(alone, 1), "with": round(busy, 1)}
            waiting.append(_cell(f"loss-{name}", f"what {type(work).__name__} lose meanwhile", "%", loss, details))
    compared += checked(engine)[1]
    yield from _with_bytes(waiting, compared)


def _with_bytes(cells: Sequence[Cell], compared: int) -> Iterator[Cell]:
    return (replace(cell, compared_bytes=compared) for cell in cells)


def sizes(rig: Rig, run: int, tokens: int) -> list[Cell]:
    """One request of *tokens* tokens at a time, from the client's call to its end."""
    samples: dict[str, list[float]] = {"store": [], "load": []}
    with filled(rig, run, tokens) as engine:
        known, compared = checked(engine)
        size = known.chunks * engine.cache.chunk_bytes
        for _ in range(_ROUNDS):
            fresh = Request(known.chunks)
            began_s = time.monotonic()
            engine.store(fresh)
            engine.ended()
            samples["store"].append(size / (time.monotonic() - began_s) / 1e9)
            answer = engine.found(fresh)
            began_s = time.monotonic()
            engine.load(fresh, answer)
            engine.ended()
            samples["load"].append(size / (time.monotonic() - began_s) / 1e9)
        compared += checked(engine)[1]
    cells = []
    for way, rates in samples.items():
        shares = spread([rate / rig.ceilings[way] for rate in rates])
        what = f"one {way} of {tokens} tokens, {size >> 20} MiB, from the call to its end, runs of {run_name(run)}"
        details = {"gb_s": round(statistics.median(rates), 2)}
        made = _cell(f"{way}-{tokens // 1024}k-tokens-{run_name(run)}", what, "of ceiling", shares.p50, details)
        cells.append(replace(made, spread=shares, compared_bytes=compared))
    return cells


def modes(rig: Rig, run: int) -> Found:
    """The ways that need no ring, for the same cache; of mapped also another run, and beside the engine's products."""
    config = ServerConfig(chunk_tokens=rig.chunk_tokens)
    with OwnServer(_SLOW_L1, memory=rig.memory, config=config) as own:
        own.settle()
        for mode in (Mode.CLIENT_MOVED, Mode.STREAMED):
            reached = replace(rig.config, server=own.client.server, modes=(mode,))
            slow = replace(rig, config=reached, server_pid=own.pid, job_bytes=_SLOW_JOB, l1_bytes=_SLOW_L1)
            yield from _of_mode(slow, run, (None,), _ONE_WAY)
    mapped = replace(rig, config=replace(rig.config, modes=(Mode.MAPPED,)))
    for size, kinds in ((run, (None, Products)), (_SMALL_RUN, (None,))):
        yield from _of_mode(mapped, size, kinds, WAYS)


def _of_mode(rig: Rig, run: int, kinds: Sequence[type[Work] | None], ways: Ways) -> Found:
    """Yield the cells of one engine: idle, and beside each kind of work."""
    mode = rig.config.modes[0]
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(engine_for(rig, run))
        except NotReadyError as e:
            for kind in kinds:
                names = [f"{way}-{run_name(run)}{f'-{kind.__name__.lower()}' if kind else ''}" for way in ways]
                names += [f"loss-{name}" for name in names if kind]
                what = f"mode {mode}, runs of {run_name(run)}, {kind.__name__ if kind else 'idle'}"
                for name in names:
                    yield Cell(name=f"{mode}-{name}", what=what, unit="", skipped=str(e))
            return
        note(f"an engine with runs of {run_name(run)} is connected, mode {mode}")
        for _ in range(_FILLS.get(mode, 0)):
            _fill(rig, engine)
            note("it stored as much as the server has memory for")
        for kind in kinds:
            work = stack.enter_context(closing(kind())) if kind else None
            for cell in _moved(rig, engine, work, ways):
                yield replace(cell, name=f"{mode}-{cell.name}")


def warm(rig: Rig, run: int) -> None:
    """Store until all of the server's memory was used once: nothing is measured in memory that nobody touched."""
    note("an engine warms the server's memory")
    with filled(rig, run):
        note("all of it was used once")


@contextmanager
def filled(rig: Rig, run: int, tokens: int = 0) -> Iterator[GpuEngine]:
    """An engine whose chunks fill the server's memory; see ``engine_for``.

    While memory is cut into slots of another size, a store takes regions over: once for each, and not measured here.
    """
    with engine_for(rig, run, tokens) as engine:
        _fill(rig, engine)
        yield engine


def _fill(rig: Rig, engine: GpuEngine) -> None:
    """Store as much as the server has memory for."""
    for _ in range(-(-rig.l1_bytes // (engine.cache.chunks * engine.cache.chunk_bytes)) + 1):
        engine.store(Request(engine.cache.chunks))
        engine.ended()


def engine_for(rig: Rig, run: int, tokens: int = 0) -> GpuEngine:
    """Return an engine with runs of *run* bytes, on the current device, with blocks for one job or for *tokens*."""
    chunk_bytes = PLANES * (rig.chunk_tokens // BLOCK_TOKENS) * run
    wanted = tokens or rig.job_bytes // chunk_bytes * rig.chunk_tokens
    return GpuEngine(rig.config, Cache(run, wanted, rig.chunk_tokens, run), rig.chunk_tokens)


def checked(engine: GpuEngine) -> tuple[Request, int]:
    """Store the sources, load them into poisoned targets, compare all bytes; returns what is stored by now."""
    known = Request(engine.cache.chunks)
    engine.store(known)
    engine.ended()
    engine.cache.poison()
    again = Request(known.chunks)
    again.keys = known.keys
    engine.load(again, engine.found(again))
    _, loaded = engine.ended()
    if any(loaded.values()) or engine.cache.differs():
        raise WrongBytesError(f"the bytes that came back are not those that were stored: {engine.told()}")
    return known, known.chunks * engine.cache.chunk_bytes


def _alone(work: Work | None) -> float:
    """Return what the work gets done while nothing moves; it rests afterwards."""
    if work is None:
        return 0.0
    pause = threading.Event()
    work.switch(on=True)
    pause.wait(_SETTLE_S)
    began_s = time.monotonic()
    pause.wait(_ALONE_S)
    rate = work.rate(began_s, time.monotonic())
    work.switch(on=False)
    return rate


def _cell(name: str, what: str, unit: str, value: float, details: dict[str, float]) -> Cell:
    return Cell(name=name, what=what, unit=unit, value=float(np.round(value, 4)), details=details)


def _cpu(server_pid: int) -> tuple[float, float]:
    """CPU seconds so far of our threads in the engine, and of the server and its movers."""
    clocks = [
        time.clock_gettime(time.pthread_getcpuclockid(t.ident))
        for t in threading.enumerate()
        if t.name.startswith("kvpool") and t.ident is not None
    ]
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children")
    pids = [server_pid, *(int(pid) for pid in (children.read_text().split() if children.exists() else ()))]
    return sum(clocks), sum(_process_s(pid) for pid in pids)


def _process_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK
