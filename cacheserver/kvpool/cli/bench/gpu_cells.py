# SPDX-License-Identifier: Apache-2.0
"""The cells of `kvpool bench gpu`: what moves, end to end from the client's call, and what that costs the engine."""

import os
import statistics
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kvpool.cli.bench.gpu_engine import BLOCK_TOKENS, PLANES, Cache, GpuEngine, NotReadyError, Request
from kvpool.cli.bench.gpu_rig import WAYS, Rig, Ways, run_name
from kvpool.cli.bench.gpu_work import Products, Work
from kvpool.cli.bench.results import Cell, spread
from kvpool.cli.errors import Failure
from kvpool.model.identity import Mode

__all__ = ["Flow", "Moved", "checked", "engine_for", "modes", "moving", "sizes", "warm"]

_SETTLE_S: Final = 0.4
_ALONE_S: Final = 1.2
_ROUNDS: Final = 12
_DEPTH: Final = 2
_TICK: Final = os.sysconf("SC_CLK_TCK")
_SMALL_GIB: Final = 0.5
_FILLS: Final = 2
"""A client that maps memory takes new memory at the first time, and locks its pages while it stores."""

_SMALL_RUN: Final = 4096


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


def moving(rig: Rig, run: int, work: Work | None = None, ways: Ways | None = None) -> list[Cell]:
    """Store, load and both at once with runs of *run* bytes; idle, or while *work* keeps the device busy."""
    cells: list[Cell] = []
    label = run_name(run)
    with engine_for(rig, run) as engine:
        compared = 0
        if rig.config.modes[0] is Mode.CLIENT_MOVED:
            for _ in range(_FILLS):
                _fill(rig, engine)
        for way, kinds in (ways or WAYS).items():
            # Each time anew: what the stores of a cell bring drives out what was there before.
            known, more = checked(engine)
            compared += more
            name = f"{way}-{label}" if work is None else f"{way}-{label}-{type(work).__name__.lower()}"
            alone = [_alone(work)] if work is not None else []
            moved = Flow(rig, engine, known).run(kinds, rig.busy_seconds if work else rig.seconds)
            share = moved.gb_s / rig.ceilings[way]
            details = {"gb_s": round(moved.gb_s, 2), **moved.cpu()}
            what = f"{way}, end to end, runs of {label}, {'idle' if work is None else type(work).__name__}"
            cells.append(_cell(name, what, "of ceiling", share, details))
            if work is not None:
                busy = work.rate(moved.began_s + _SETTLE_S / 2, moved.ended_s)
                alone.append(_alone(work))
                work.switch(on=False)
                loss = 100 * (1 - busy / statistics.mean(alone))
                details = {"alone": round(statistics.mean(alone), 1), "with": round(busy, 1)}
                cells.append(_cell(f"loss-{name}", f"what {type(work).__name__} lose meanwhile", "%", loss, details))
        compared += checked(engine)[1]
    return [replace(cell, compared_bytes=compared) for cell in cells]


def sizes(rig: Rig, run: int, tokens: int) -> list[Cell]:
    """One request of *tokens* tokens at a time, from the client's call to its end."""
    samples: dict[str, list[float]] = {"store": [], "load": []}
    with engine_for(rig, run, tokens) as engine:
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


def modes(rig: Rig, run: int) -> list[Cell]:
    """The ways that need no ring, for the same cache; of mapped also another run, and beside the engine's products."""
    cells = []
    for mode in (Mode.CLIENT_MOVED, Mode.STREAMED):
        slower = replace(rig, config=replace(rig.config, modes=(mode,)), job_bytes=int(_SMALL_GIB * (1 << 30)))
        made = moving(slower, run, ways={way: WAYS[way] for way in ("store", "load")})
        cells += [replace(cell, name=f"{mode}-{cell.name}") for cell in made]
    return [*cells, *_mapped(replace(rig, config=replace(rig.config, modes=(Mode.MAPPED,))), run)]


def _mapped(rig: Rig, run: int) -> list[Cell]:
    cells = []
    for size, kind in ((run, None), (_SMALL_RUN, None), (run, Products)):
        what = f"mode mapped, runs of {run_name(size)}, {kind.__name__ if kind else 'idle'}"
        with ExitStack() as stack:
            try:
                work = stack.enter_context(closing(kind())) if kind else None
                made = moving(rig, size, work)
            except NotReadyError as e:
                names = [f"{way}-{run_name(size)}{f'-{kind.__name__.lower()}' if kind else ''}" for way in WAYS]
                names += [f"loss-{name}" for name in names if kind]
                made = [Cell(name=name, what=what, unit="", skipped=str(e)) for name in names]
        cells += [replace(cell, name=f"{Mode.MAPPED}-{cell.name}") for cell in made]
    return cells


def warm(rig: Rig, run: int) -> None:
    """Store until all of the server's memory was used once: nothing is measured in memory that nobody touched."""
    with engine_for(rig, run) as engine:
        _fill(rig, engine)


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
        raise Failure(f"the bytes that came back are not those that were stored: {engine.told()}")
    return known, known.chunks * engine.cache.chunk_bytes


def _alone(work: Work | None) -> float:
    assert work is not None
    pause = threading.Event()
    work.switch(on=True)
    pause.wait(_SETTLE_S)
    began_s = time.monotonic()
    pause.wait(_ALONE_S)
    return work.rate(began_s, time.monotonic())


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
