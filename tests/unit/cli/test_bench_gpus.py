# SPDX-License-Identifier: Apache-2.0
"""Several GPUs at one server: what the bench tells its engines, and what it makes of their answers."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.lazy_driver import LazyDriver

from kvpool.cli.bench import gpu_ceiling
from kvpool.cli.bench.gpu_devices import not_measured, together
from kvpool.cli.bench.gpu_rig import WAYS, Rig, WrongBytesError, run_name
from kvpool.cli.bench.results import Cell, table
from kvpool.cli.errors import Failure
from kvpool.config import ClientConfig
from kvpool.transfer import cuda

GIB = 1 << 30
RUN = 32768

ENGINE = """
import json, sys, time
from collections.abc import Callable
from pathlib import Path
from typing import Any

setup = json.loads(sys.stdin.readline())
number, log = setup["device"], Path(sys.argv[1])

def tell(**said):
    print(json.dumps(said), flush=True)

def note(text):
    with log.open("a") as file:
        file.write(f"{number} {text}\\n")

note(f"job {setup['rig']['job_bytes']} for {setup['rig']['seconds']}")
PLACE_FOR_FAULTS
tell()
moves = 0
for line in sys.stdin:
    order = json.loads(line)
    what = order["what"]
    note(what + {"check": "", "open": f" {order.get('run')}"}.get(what, " " + order.get("way", "both")))
    if what == "check":
        tell(compared_bytes=100)
    elif what == "open":
        moves = 0
        tell()
    elif what == "copy":
        tell(moved_bytes=50 * 10**9, began_s=0.0, ended_s=1.0)
    else:
        # Alone 40 GB/s; together 30 each, the second one half a second later.
        alone = moves % 2
        moves += 1
        if alone:
            tell(moved_bytes=40 * 10**9, began_s=5.0, ended_s=6.0)
        else:
            tell(moved_bytes=60 * 10**9, began_s=10.0 + number / 2, ended_s=12.0 + number / 2)
note("end")
"""


def rig(l1_bytes: int = 64 * GIB) -> Rig:
    return Rig(
        config=ClientConfig(),
        server_pid=1,
        chunk_tokens=256,
        ceilings={},
        seconds=1.0,
        busy_seconds=2.5,
        job_bytes=2 * GIB,
        l1_bytes=l1_bytes,
        memory="/dev/shm",
    )


def measured(
    tmp_path: Path, fault: str = "", l1_bytes: int = 64 * GIB, runs: Sequence[int] = (RUN,)
) -> tuple[dict[str, Cell], list[str]]:
    log = tmp_path / "log"
    command = (sys.executable, "-c", ENGINE.replace("PLACE_FOR_FAULTS", fault), str(log))
    cells = [*together(rig(l1_bytes), runs, 2, command)]
    return {cell.name: cell for cell in cells}, log.read_text().splitlines()


def test_rates_are_those_of_all_engines_from_the_first_begin_to_the_last_end(tmp_path: Path) -> None:
    cells, _ = measured(tmp_path)

    assert len(cells) == 3 * len(WAYS)
    for way in WAYS:
        together_, alone = cells[f"gpus-{way}-32KiB"], cells[f"gpus-of-alone-{way}-32KiB"]
        assert together_.value == pytest.approx(48 / 100)
        assert alone.value == pytest.approx(48 / 80)
        assert cells[f"gpus-ceiling-{way}-32KiB"].value == pytest.approx(100)
        assert together_.details["gb_s"] == 48
        assert together_.details["gpu1_gb_s"] == 30
        assert together_.details["gpu1_alone_gb_s"] == 40
        assert together_.details["gpu1_link_gb_s"] == 50


def test_bytes_are_compared_before_each_measurement_and_after_the_last_one(tmp_path: Path) -> None:
    cells, log = measured(tmp_path)
    of_one = [line.removeprefix("1 ") for line in log if line.startswith("1 ")]

    assert of_one[0] == f"job {2 * GIB} for 1.0"
    assert of_one[1:4] == [f"open {RUN}", "check", "move both"]
    each = [[f"copy {way}", "check", f"move {way}", "check", f"move {way}"] for way in WAYS]
    assert of_one[4:] == [*each[0], *each[1], *each[2], "check", "end"]
    # Two engines, each with one check at the start, two for each way, and one behind the way.
    behind = {way: {cell.compared_bytes for name, cell in cells.items() if f"-{way}-" in name} for way in WAYS}
    assert behind == {"store": {2 * 4 * 100}, "load": {2 * 6 * 100}, "both": {2 * 8 * 100}}


def test_a_cell_comes_as_soon_as_bytes_were_compared_behind_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cells = together(rig(), [RUN], 2, (sys.executable, "-c", ENGINE.replace("PLACE_FOR_FAULTS", ""), str(log)))

    assert next(cells).name == "gpus-store-32KiB"
    assert "0 move both" in log.read_text()
    assert log.read_text().count("0 move load") == 1
    cells.close()
    assert "0 end" in log.read_text()


def test_all_runs_are_measured_with_the_same_processes_which_settle_meanwhile(tmp_path: Path) -> None:
    cells, log = measured(tmp_path, runs=(RUN, 4096))

    assert [cells[f"gpus-both-{label}"].value for label in ("32KiB", "4KiB")] == [pytest.approx(48 / 100)] * 2
    assert [line for line in log if line.startswith("1 ") and ("open" in line or "end" in line or "job" in line)] == [
        f"1 job {2 * GIB} for 1.0",
        f"1 open {RUN}",
        "1 open 4096",
        "1 end",
    ]


def test_the_server_settles_while_the_processes_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = (sys.executable, "-c", ENGINE.replace("PLACE_FOR_FAULTS", ""), str(log))
    settled: list[bool] = []

    [*together(rig(), [RUN], 2, command, lambda: settled.append("open" in (log.read_text() if log.exists() else "")))]

    assert settled == [False]


def test_wrong_bytes_of_an_engine_are_told_apart_from_its_other_problems(tmp_path: Path) -> None:
    with pytest.raises(WrongBytesError, match="the engine of GPU 1: bytes differ"):
        measured(tmp_path, "tell(problem='bytes differ', wrong=True) if number else None")


def test_an_engine_alone_is_measured_while_the_others_rest(tmp_path: Path) -> None:
    _, log = measured(tmp_path)
    began = log.index("0 move store")

    assert log[began - 1 : began + 3] == ["0 check", "0 move store", "1 check", "1 move store"]


def test_jobs_are_smaller_where_l1_has_no_room_for_all(tmp_path: Path) -> None:
    _, log = measured(tmp_path, l1_bytes=16 * GIB)

    assert f"0 job {GIB} for 1.0" in log


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("tell(problem='bytes differ') if number else None", "the engine of GPU 1: bytes differ"),
        ("sys.exit(3) if number else None", "the engine of GPU 1 ended"),
    ],
)
def test_what_one_engine_cannot_do_is_said_with_its_number(tmp_path: Path, fault: str, said: str) -> None:
    with pytest.raises(Failure, match=said):
        measured(tmp_path, fault)

    assert "0 end" in (tmp_path / "log").read_text()


def test_one_device_alone_is_not_measured_and_says_so() -> None:
    cells = not_measured(RUN, "it needs 2 CUDA devices, and 1 is visible")

    assert [cell.name for cell in cells] == [f"gpus-{way}-{run_name(RUN)}" for way in WAYS]
    assert "not measured: it needs 2 CUDA devices" in table(cells)


def test_copies_over_a_link_are_all_made_and_what_they_took_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = LazyDriver()
    called: list[str] = []

    def current(handle: Any) -> int:
        handle._obj.value = 7
        return 0

    def noted(name: str) -> Callable[..., int]:
        return lambda *_: called.append(name) or 0

    driver["cuCtxGetCurrent"] = current
    given_back = ("cuMemHostUnregister", "cuMemFree_v2", "cuStreamDestroy_v2")
    for name in given_back:
        driver[name] = noted(name)
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    monkeypatch.setattr(gpu_ceiling, "_GIB", 1 << 12)

    with gpu_ceiling.Link(str(tmp_path)) as link:
        for way, (out, into) in WAYS.items():
            driver.ran.clear()
            copied, began_s, ended_s = link.copy(way)
            assert copied == 24 * (out + into) * (1 << 12)
            assert began_s < ended_s
            assert (driver.ran.count("out"), driver.ran.count("in")) == (26 * out, 26 * into)
        assert not called

    assert sorted(called) == sorted(given_back * 2)
    assert not list(tmp_path.iterdir())
