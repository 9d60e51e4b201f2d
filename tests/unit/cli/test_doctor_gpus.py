# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N802 - names are those of the driver
"""What the doctor tries of a GPU, on a driver that is not there."""

import ctypes
import itertools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.lazy_driver import LazyDriver

from kvpool.cli.doctor import gpus
from kvpool.cli.doctor.facts import GpuFacts, GpusFacts
from kvpool.cli.doctor.probe import Probed, main, map_in_child, open_in_child, probe
from kvpool.transfer import cuda
from kvpool.transfer.cuda import CudaError
from kvpool.transfer.mover.inventory import Gpu, InventoryError

LENGTH = 1 << 16
UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@dataclass
class FakeDriver:
    """Copies take a quarter and half of a second; *fails*: the calls that the driver refuses."""

    fails: frozenset[str] = frozenset()
    log: list[str] = field(default_factory=list)
    now_s: float = 0.0
    descriptor: int = -1

    def _call(self, name: str, *_: object) -> int:
        self.log.append(name)
        if name in self.fails:
            raise CudaError(name, 999, "refused")
        return 7

    def use(self) -> None:
        self._call("use")

    def allocate(self, length: int) -> int:
        assert length == LENGTH
        return self._call("allocate")

    def free(self, address: int) -> None:
        self._call("free", address)

    def export(self, address: int) -> bytes:
        self._call("export", address)
        return b"handle"

    def create(self, length: int) -> int:
        assert length % (2 << 20) == 0
        return self._call("create", length)

    def export_descriptor(self, address: int) -> int:
        self._call("export_descriptor", address)
        self.descriptor = os.open(os.devnull, os.O_RDONLY)
        return self.descriptor

    def register(self, address: int, length: int) -> None:
        self._call("register", address, length)

    def unregister(self, address: int) -> None:
        self._call("unregister", address)

    def stream(self, *, urgent: bool) -> int:
        return self._call("stream", urgent)

    def wait_stream(self, stream: int) -> None:
        self._call("wait", stream)

    def copy_in(self, device: int, host: int, length: int, stream: int) -> None:
        self._call("copy_in", device, host, length, stream)
        self.now_s += 0.5

    def copy_out(self, host: int, device: int, length: int, stream: int) -> None:
        self._call("copy_out", host, device, length, stream)
        self.now_s += 0.25


def tried(tmp_path: Path, *fails: str, opens: str = "", maps: str = "") -> tuple[Probed, FakeDriver]:
    driver = FakeDriver(frozenset(fails))
    found = probe(lambda: driver, lambda _: opens, lambda *_: maps, str(tmp_path), lambda: driver.now_s, LENGTH)
    return found, driver


def test_a_device_that_can_do_it_all_has_its_speeds(tmp_path: Path) -> None:
    found, driver = tried(tmp_path)

    assert found == Probed(store_bytes_per_s=LENGTH / 0.25, load_bytes_per_s=LENGTH / 0.5)
    assert driver.log[-1] == "free"
    assert driver.log.count("register") == driver.log.count("unregister") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", ["use", "allocate", "stream", "copy_in", "copy_out", "wait"])
def test_what_stops_the_trial_is_the_problem(tmp_path: Path, fails: str) -> None:
    found, driver = tried(tmp_path, fails)

    assert found == Probed(problem=f"{fails}: refused (999)")
    assert ("free" in driver.log) is (fails not in {"use", "allocate"})
    assert driver.log.count("register") == driver.log.count("unregister")


def test_a_refused_handle_does_not_keep_the_speed_from_being_measured(tmp_path: Path) -> None:
    exported, _ = tried(tmp_path, "export")
    opened, _ = tried(tmp_path, opens="cuIpcOpenMemHandle_v2: refused")

    assert exported.handle == "export: refused (999)"
    assert opened.handle == "cuIpcOpenMemHandle_v2: refused"
    assert exported.store_bytes_per_s == opened.store_bytes_per_s == LENGTH / 0.25


@pytest.mark.parametrize("fails", ["create", "export_descriptor"])
def test_virtual_memory_that_cannot_be_shared_is_said_and_costs_nothing_else(tmp_path: Path, fails: str) -> None:
    found, _ = tried(tmp_path, fails)

    assert found == Probed(
        descriptors=f"{fails}: refused (999)", store_bytes_per_s=LENGTH / 0.25, load_bytes_per_s=LENGTH / 0.5
    )


@pytest.mark.parametrize("maps", ["", "other bytes were found there"])
def test_a_descriptor_is_closed_whatever_came_of_it(tmp_path: Path, maps: str) -> None:
    found, driver = tried(tmp_path, maps=maps)

    assert found.descriptors == maps
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(driver.descriptor)


class SharedMemory(LazyDriver):
    """A driver whose virtual memory is files; *spoils*: what is mapped there is not what was exported."""

    spoils = False

    def cuDeviceGetUuid_v2(self, uuid: Any, device: int) -> None:
        del device
        ctypes.memmove(uuid._obj, bytes(range(16)), 16)

    def cuMemCreate(self, piece: Any, length: int, kind: Any, flags: int) -> None:
        shared_by, place = kind._obj.shared_by, kind._obj.place
        assert (kind._obj.kind, shared_by, place, flags) == (1, 1, 1, 0)
        self.made = piece._obj.value = os.memfd_create("virtual")
        os.truncate(self.made, length)

    def cuMemExportToShareableHandle(self, descriptor: Any, _piece: int, kind: int, flags: int) -> None:
        assert (kind, flags) == (1, 0)
        if self.spoils:
            other = os.memfd_create("other")
            os.truncate(other, os.fstat(self.made).st_size)
            descriptor._obj.value = other
        else:
            descriptor._obj.value = os.dup(self.made)


@pytest.mark.parametrize("spoils", [False, True])
def test_another_process_finds_what_was_written_or_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, spoils: bool
) -> None:
    """Both ends of the trial in this process, over one driver; a device that can do nothing else."""
    driver = SharedMemory()
    driver.spoils = spoils
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    monkeypatch.setattr(cuda, "_name", lambda _: "refused")

    def maps(descriptor: int, salt: bytes) -> str:
        ended = main("map", UUID, f"{descriptor}:{salt.hex()}")
        return capsys.readouterr().err.strip() if ended else ""

    found = probe(
        lambda: cuda.Context.of_uuid(bytes(range(16))),
        lambda _: "",
        maps,
        str(tmp_path),
        itertools.count().__next__,
        LENGTH,
    )

    assert found.descriptors == ("other bytes were found there" if spoils else "")
    assert not found.problem


def test_memory_that_is_not_pinned_is_said_and_not_measured(tmp_path: Path) -> None:
    found, _ = tried(tmp_path, "register")

    assert found == Probed(pinning="register: refused (999)")


def test_a_device_that_fails_to_the_end_still_has_its_first_problem(tmp_path: Path) -> None:
    found, _ = tried(tmp_path, "copy_out", "unregister", "free")

    assert found == Probed(problem="copy_out: refused (999)")


def device(number: int, *, mig: bool = False) -> Gpu:
    return Gpu(uuid=f"GPU-{number}", name="H200", memory_bytes=9, free_bytes=5, mig=mig)


def test_each_whole_gpu_is_tried(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def tries(uuid: str, folder: str) -> Probed:
        asked.append((uuid, folder))
        return Probed(handle="no", store_bytes_per_s=2.0)

    found = gpus.gpus_facts("shared", lambda: [device(0), device(1, mig=True)], tries, tmp_path)

    assert asked == [("GPU-0", "shared")]
    assert found.device_files
    assert found.gpus[0] == GpuFacts(
        name="H200", uuid="GPU-0", memory_bytes=9, free_bytes=5, mig=False, handle_problem="no", store_bytes_per_s=2.0
    )
    assert found.gpus[1].mig


def test_no_driver_is_told_by_its_reason(tmp_path: Path) -> None:
    def fails() -> list[Gpu]:
        raise InventoryError("no NVIDIA driver is visible")

    assert gpus.gpus_facts("shared", fails, None, tmp_path / "none") == GpusFacts(problem="no NVIDIA driver is visible")


def test_a_device_that_is_not_there_is_the_problem(tmp_path: Path) -> None:
    """The real programs: without a driver they say that there is none, with one that this device is not visible."""
    found = gpus.probe_in_child(UUID, str(tmp_path))

    assert "libcuda.so.1" in found.problem or "not visible" in found.problem
    assert open_in_child(UUID, bytes(64))
    with (tmp_path / "file").open("wb") as file:
        assert map_in_child(UUID, file.fileno(), bytes(16))


@pytest.mark.parametrize(
    ("program", "problem"),
    [("import time; time.sleep(60)", "did not answer within"), ("raise SystemExit('broken')", "ended with 1: broken")],
)
def test_a_trial_that_hangs_or_dies_is_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, problem: str
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\n{program}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(gpus.sys, "executable", str(fake))
    monkeypatch.setattr(gpus, "PROBE_S", 2.0)

    assert problem in gpus.probe_in_child(UUID, str(tmp_path)).problem
