# SPDX-License-Identifier: Apache-2.0
"""What the GPU bench keeps if it is ended early, and that no number comes before its bytes were compared."""

import argparse
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.cli.test_bench_gpus import rig

from kvpool.cli.bench import gpu
from kvpool.cli.bench.gpu_devices import Order, Setup, Told, What
from kvpool.cli.bench.gpu_rig import WAYS, WrongBytesError
from kvpool.cli.bench.results import Cell
from kvpool.cli.errors import Failure
from kvpool.model.identity import Mode

GIB = 1 << 30
MINE = [f"kvpool.cli.bench.{name}" for name in ("gpu_cells", "gpu_engine", "gpu_work", "gpu_child")]


def cell(number: int, compared: int = 100) -> Cell:
    return Cell(name=f"cell-{number}", what="", unit="GB/s", value=40.0 + number, compared_bytes=compared)


Ended = Callable[[], object]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Ended], int]:
    """Run the command with two cells, after which something happens, and one more."""
    monkeypatch.setattr(gpu, "visible_gpus", lambda: [SimpleNamespace(name="a GPU")])
    monkeypatch.setattr(gpu, "OwnServer", lambda *_, **__: nullcontext())
    arguments = {"cells": "idle", "runs": "4KiB", "l1": "1GiB", "job": "1GiB", "directory": None}

    def run(then: Ended) -> int:
        def measured(*_: object) -> Iterator[Cell]:
            yield cell(1)
            yield cell(2)
            then()
            yield cell(3)

        monkeypatch.setattr(gpu, "_measured", measured)
        return gpu.run(argparse.Namespace(json=str(tmp_path / "out.json"), **arguments))

    return run


def report(tmp_path: Path) -> tuple[list[str], str]:
    found = json.loads((tmp_path / "out.json").read_text())
    return [one["name"] for one in found["cells"]], found["machine"]["failed"]


def fail() -> None:
    raise Failure("nothing ended within a minute")


def interrupt() -> None:
    raise KeyboardInterrupt


def lack_memory() -> None:
    raise RuntimeError("out of memory")


def test_all_cells_are_shown_and_written(
    bench: Callable[[Ended], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(lambda: None) == 0

    assert report(tmp_path) == (["cell-1", "cell-2", "cell-3"], "")
    said = capsys.readouterr()
    assert "cell-3" in said.out
    assert "s  cell-3: 43 GB/s" in said.err


@pytest.mark.parametrize(
    ("then", "raised", "said"),
    [
        (fail, Failure, "Failure: nothing ended within a minute"),
        (interrupt, KeyboardInterrupt, "KeyboardInterrupt"),
        (lack_memory, RuntimeError, "RuntimeError: out of memory"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), SystemExit, "SystemExit: 143"),
    ],
)
def test_what_was_measured_before_the_end_is_shown_and_written(
    bench: Callable[[Ended], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    then: Ended,
    raised: type[BaseException],
    said: str,
) -> None:
    with pytest.raises(raised) as ended:
        bench(then)

    assert report(tmp_path) == (["cell-1", "cell-2"], said)
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()] == ["cell", "cell-1", "cell-2"]
    assert "2 cells were measured" in told.err
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 128 + signal.SIGTERM


def test_each_cell_is_written_at_once(bench: Callable[[Ended], int], tmp_path: Path) -> None:
    seen: list[tuple[list[str], str]] = []

    bench(lambda: seen.append(report(tmp_path)))

    assert seen == [(["cell-1", "cell-2"], "the bench is not over, or was killed")]


def test_wrong_bytes_leave_no_table_and_no_report(
    bench: Callable[[Ended], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def differ() -> None:
        raise WrongBytesError("bytes differ")

    with pytest.raises(WrongBytesError):
        bench(differ)

    assert not (tmp_path / "out.json").exists()
    assert not capsys.readouterr().out


class Rehearsal:
    """The cells' module without a device: engines, moves and comparisons are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.wrong_at, self.refused = 0, ""
        monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
        self.cells: Any = importlib.import_module(MINE[0])
        self.child: Any = importlib.import_module(MINE[3])
        for name in ("engine_for", "checked", "Flow", "OwnServer"):
            monkeypatch.setattr(self.cells, name, getattr(self, name))

    def engine_for(self, rig: Any, run: int, tokens: int = 0) -> AbstractContextManager[Any]:
        del tokens
        mode = rig.config.modes[0]
        self.log.append(f"engine {mode} {run} {rig.job_bytes >> 20} MiB at {rig.config.server}")
        if mode == self.refused:
            raise self.cells.NotReadyError("refused")
        stored = SimpleNamespace(run=run, chunks=1, chunk_bytes=rig.job_bytes)

        def store(_: object) -> None:
            self.log.append("store")

        return nullcontext(SimpleNamespace(cache=stored, store=store, ended=lambda: None))

    def checked(self, _: object) -> tuple[str, int]:
        self.log.append("check")
        if self.log.count("check") == self.wrong_at:
            raise WrongBytesError("bytes differ")
        return "known", 100

    def Flow(self, *_: object) -> Any:  # noqa: N802 - in the place of a class
        def run(kinds: tuple[bool, bool], seconds: float) -> Any:
            self.log.append(f"move {kinds} {seconds}")
            return self.cells.Moved(1 << 30, 0.0, 1.0, 0.0, 0.0)

        return SimpleNamespace(run=run)

    def OwnServer(self, l1_bytes: int, **_: object) -> Any:  # noqa: N802 - in the place of a class
        self.log.append(f"server {l1_bytes >> 20} MiB")
        client = SimpleNamespace(server="ipc:///small")
        return nullcontext(SimpleNamespace(client=client, pid=2, settle=lambda: self.log.append("settled")))

    def takes(self, cells: Iterator[Cell]) -> list[Cell]:
        found = []
        for one in cells:
            self.log.append(f"cell {one.name}")
            found.append(one)
        return found


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """Its modules are imported without torch, and are no other test's."""
    before = {name: sys.modules.pop(name, None) for name in MINE}
    yield Rehearsal(monkeypatch)
    for name, module in before.items():
        del sys.modules[name]
        delattr(sys.modules["kvpool.cli.bench"], name.rpartition(".")[2])
        if module is not None:
            sys.modules[name] = module
            setattr(sys.modules["kvpool.cli.bench"], name.rpartition(".")[2], module)


def ready_rig() -> Any:
    made = rig()
    config = msgspec.structs.replace(made.config, server="ipc:///large", modes=(Mode.RING,))
    return msgspec.structs.replace(made, ceilings=dict.fromkeys(WAYS, 50.0), config=config)


FILLS = rig().l1_bytes // rig().job_bytes + 1


def test_a_cell_comes_only_when_bytes_were_compared_behind_it(rehearsal: Rehearsal) -> None:
    found = rehearsal.takes(rehearsal.cells.moving(ready_rig(), 4096))

    assert rehearsal.log[1 : 1 + FILLS] == ["store"] * FILLS, "first the memory is filled with chunks of this size"
    assert rehearsal.log[1 + FILLS :] == [
        *("check", "move (True, False) 1.0", "check", "cell store-4KiB"),
        *("move (False, True) 1.0", "check", "cell load-4KiB"),
        *("move (True, True) 1.0", "check", "cell both-4KiB"),
    ]
    assert [one.compared_bytes for one in found] == [200, 300, 400]


def test_no_cell_comes_of_moves_behind_which_bytes_were_wrong(rehearsal: Rehearsal) -> None:
    rehearsal.wrong_at = 3

    with pytest.raises(WrongBytesError):
        rehearsal.takes(rehearsal.cells.moving(ready_rig(), 4096))

    assert [line for line in rehearsal.log if line.startswith("cell")] == ["cell store-4KiB"]


class Rest:
    """Work that does nothing."""

    def __init__(self) -> None:
        self.rates = iter((100.0, 90.0, 100.0, 45.0, 80.0, 70.0, 60.0))
        self.on = False

    def switch(self, *, on: bool) -> None:
        self.on = on

    def rate(self, began_s: float, ended_s: float) -> float:
        assert self.on
        assert began_s <= ended_s
        return next(self.rates)

    def close(self) -> None:
        self.on = False


def test_what_work_loses_is_of_its_rates_before_and_after(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal.cells, "_SETTLE_S", 0.0)
    monkeypatch.setattr(rehearsal.cells, "_ALONE_S", 0.0)
    found = {one.name: one.value for one in rehearsal.cells.moving(ready_rig(), 4096, Rest())}

    assert found["loss-store-4KiB-rest"] == pytest.approx(10.0)
    assert found["loss-load-4KiB-rest"] == pytest.approx(50.0)
    assert found["loss-both-4KiB-rest"] == pytest.approx(0.0)


def slow_ways(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    monkeypatch.setattr(rehearsal.cells, "Products", Rest)
    monkeypatch.setattr(rehearsal.cells, "_SETTLE_S", 0.0)
    monkeypatch.setattr(rehearsal.cells, "_ALONE_S", 0.0)
    return rehearsal.takes(rehearsal.cells.modes(ready_rig(), 32768))


def test_slow_ways_have_a_small_server_and_mapped_one_engine_for_each_run(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = slow_ways(rehearsal, monkeypatch)

    assert [line for line in rehearsal.log if line.split()[0] in ("server", "settled", "engine")] == [
        "server 2048 MiB",
        "settled",
        "engine client-moved 32768 256 MiB at ipc:///small",
        "engine streamed 32768 256 MiB at ipc:///small",
        "engine mapped 32768 2048 MiB at ipc:///large",
        "engine mapped 4096 2048 MiB at ipc:///large",
    ]
    assert rehearsal.log.count("store") == 2 * 9 + 2 * FILLS
    names = [f"{mode}-{way}-32KiB" for mode in ("client-moved", "streamed") for way in ("store", "load")]
    names += [f"mapped-{way}-{label}" for way in WAYS for label in ("32KiB", "4KiB", "32KiB-rest")]
    names += [f"mapped-loss-{way}-32KiB-rest" for way in WAYS]
    assert sorted(one.name for one in found) == sorted(names)


@pytest.mark.parametrize("mode", [Mode.CLIENT_MOVED, Mode.MAPPED])
def test_a_way_that_cannot_be_used_is_not_measured_and_the_others_are(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    rehearsal.refused = mode
    found = slow_ways(rehearsal, monkeypatch)

    assert {one.name.startswith(mode) for one in found if one.skipped} == {True}
    assert {one.name.startswith(mode) for one in found if one.value is not None} == {False}
    assert len(found) == 2 + 2 + 3 + 3 + 3 + 3


def serves(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, *orders: Order) -> tuple[int, list[Told]]:
    """Let an engine's process take orders; returns its exit code and what it told."""
    for name in ("engine_for", "checked", "Flow"):
        monkeypatch.setattr(rehearsal.child, name, getattr(rehearsal, name))
    link = SimpleNamespace(copy=lambda way: (len(way), 1.0, 2.0))
    monkeypatch.setattr(rehearsal.child, "Link", lambda _: nullcontext(link))
    monkeypatch.setattr(rehearsal.child, "use_device", lambda number: rehearsal.log.append(f"device {number}"))
    said = [Setup(rig=ready_rig(), device=1), *orders]
    answers = io.BytesIO()
    code = rehearsal.child.serve(io.BytesIO(b"".join(msgspec.json.encode(one) + b"\n" for one in said)), answers)
    return code, [msgspec.json.decode(line, type=Told) for line in answers.getvalue().splitlines()]


def test_an_engine_s_process_opens_a_cache_for_each_run(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    once = (Order(what=What.CHECK), Order(what=What.MOVE, way="load"))
    orders = [o for run in (32768, 4096) for o in (Order(what=What.OPEN, run=run), *once)]

    code, told = serves(rehearsal, monkeypatch, *orders, Order(what=What.COPY, way="store"))

    assert code == 0
    of_one = ["check", "move (False, True) 1.0"]
    opened = [f"engine ring {run} 2048 MiB at ipc:///large" for run in (32768, 4096)]
    assert rehearsal.log == ["device 1", opened[0], *of_one, opened[1], *of_one]
    assert [one.compared_bytes for one in told] == [0, 0, 100, 0, 0, 100, 0, 0]
    assert [one.moved_bytes for one in told] == [0, 0, 0, 1 << 30, 0, 0, 1 << 30, 5]


def test_an_engine_s_process_says_that_bytes_were_wrong(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsal.wrong_at = 1

    code, told = serves(rehearsal, monkeypatch, Order(what=What.OPEN, run=4096), Order(what=What.CHECK))

    assert code == 1
    assert (told[-1].problem, told[-1].wrong) == ("bytes differ", True)
