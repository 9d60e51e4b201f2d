# SPDX-License-Identifier: Apache-2.0
"""Engines on two GPUs at one server, each with a mover of its own: what becomes of one is no matter of the other."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.fakes.server_process import ServerProcess
from tests.gpu.children import SPARE_BYTES, Child
from tests.gpu.waiting import holders, left_over, until

from kvpool.cli.admin import movers_of
from kvpool.transfer.mover.inventory import InventoryError, visible_gpus

TURNS = 40


def missing() -> str:
    try:
        count = len(visible_gpus())
    except InventoryError as e:
        return str(e)
    return "" if count > 1 else f"needs two CUDA devices, and {count} is visible"


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "two devices")


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        l1 = {"directory": memory, "allow_disk": False}
        http = {"operations_host": "", "admin_socket": f"{folder}/admin.sock"}
        with ServerProcess(Path(folder), l1=l1, http=http) as made:
            yield made


def rows(server: ServerProcess) -> list[dict]:
    """The movers' processes, as the admin face shows them."""
    return [row for row in movers_of(server.config["http"]["admin_socket"]) if row["pid"] is not None]


def moved(row: dict) -> bool:
    """True if bytes went through that mover both ways, under grants that are over."""
    return row["joined"] and row["stored_bytes"] and row["loaded_bytes"]


def movers(server: ServerProcess) -> dict[str, int]:
    """UUID of each ring's device to its mover's process."""
    return {row["gpu"]: row["pid"] for row in rows(server)}


def free() -> dict[str, int]:
    return {gpu.uuid: gpu.free_bytes for gpu in visible_gpus()}


def at_rest() -> dict[str, int]:
    """Free memory of each device while nobody else's Python uses one."""
    left_over()
    return free()


def used(base: dict[str, int]) -> set[str]:
    """Devices that have less free memory than before."""
    return {uuid for uuid, now in free().items() if now < base[uuid] - SPARE_BYTES}


def uses(base: dict[str, int], wanted: set[str]) -> None:
    """Wait until these devices, and no others, have less free memory than before: NVML is told late."""

    def there() -> str:
        less = {uuid: f"{(base[uuid] - now) >> 20} MiB less than before" for uuid, now in free().items()}
        return f"{less}; wanted less on {wanted or 'none'}; who has devices: {holders()}"

    until(lambda: used(base) == wanted, told=there)


def has_movers(server: ServerProcess, wanted: dict[str, int]) -> None:
    """Wait until there are these movers and no others."""
    until(lambda: movers(server) == wanted, told=lambda: f"{rows(server)}; wanted {wanted}")


def by_number(number: int) -> dict[str, str]:
    """As workers of one engine choose: all see all devices."""
    return {"KVPOOL_TEST_DEVICE": str(number)}


def by_sight(number: int) -> dict[str, str]:
    """As containers are given them: each sees its own alone, as its first one."""
    return {"CUDA_VISIBLE_DEVICES": visible_gpus()[number].uuid}


class Engine(Child):
    """A child that is ready, on one device."""

    device = ""

    def ready(self) -> None:
        self.says("ready")
        self.begins("device")
        self.device = self.hears()


@contextmanager
def engines(server: ServerProcess, choose=by_number) -> Iterator[tuple[Engine, Engine]]:
    """One on each device; whoever still lives at the end is told to end, and does."""
    both = Engine(server, 1, environ=choose(0)), Engine(server, 2, environ=choose(1))
    try:
        for engine in both:
            engine.ready()
        assert both[0].device != both[1].device
        yield both
        for engine in both:
            if not engine.process.stdin.closed:
                assert engine.ends() == 0
    finally:
        for engine in both:
            if engine.process.poll() is None:
                engine.killed()


@pytest.mark.parametrize("choose", [by_number, by_sight])
def test_each_engine_has_a_mover_on_its_own_device(server: ServerProcess, choose) -> None:
    base = at_rest()
    with engines(server, choose) as (one, other):
        one.begins(f"turns {TURNS}")
        other.begins(f"turns {TURNS}")
        one.says(f"turns {TURNS}")
        other.says(f"turns {TURNS}")

        until(lambda: all(moved(row) for row in rows(server)), told=lambda: rows(server))
        found = rows(server)
        assert {row["gpu"] for row in found} == {one.device, other.device}
        assert len({row["pid"] for row in found}) == len(found) == 2
        uses(base, {one.device, other.device})
    has_movers(server, {})
    uses(base, set())


def test_an_engine_and_its_mover_take_nothing_of_another_device(server: ServerProcess) -> None:
    base = at_rest()
    engine = Engine(server, 1, environ=by_number(1))
    engine.ready()
    engine.does(f"turns {TURNS}")
    uses(base, {engine.device})
    assert engine.ends() == 0


def test_what_one_engine_stored_another_one_on_another_device_loads(server: ServerProcess) -> None:
    writer = Engine(server, 7, environ=by_number(0))
    writer.ready()
    writer.does("store")
    reader = Engine(server, 7, environ=by_number(1))
    reader.ready()
    assert reader.device != writer.device
    for _ in range(5):
        reader.does("load")
        writer.does("load")
    assert writer.ends() == reader.ends() == 0


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_mover_is_replaced_on_its_device_while_the_other_moves_on(server: ServerProcess, number: int) -> None:
    with engines(server) as both:
        hurt, other = both[number], both[1 - number]
        before = movers(server)
        hurt.begins(f"rough {TURNS}")
        other.begins(f"turns {TURNS}")
        os.kill(before[hurt.device], signal.SIGKILL)
        other.says(f"turns {TURNS}")
        hurt.says(f"rough {TURNS}")
        hurt.does("healthy")
        hurt.does("turns 5")
        other.does("turns 5")

        after = movers(server)
        assert set(after) == set(before)
        assert after[other.device] == before[other.device]
        assert after[hurt.device] != before[hurt.device]


def alone_moves_on(server: ServerProcess, base: dict[str, int], before: dict[str, int], engine: Engine) -> None:
    """Its own mover alone is left, no other device is used, and it stores and loads."""
    has_movers(server, {engine.device: before[engine.device]})
    uses(base, {engine.device})
    engine.does("turns 5")


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_engine_gives_its_device_back_while_the_other_moves_on(server: ServerProcess, number: int) -> None:
    base = at_rest()
    with engines(server) as both:
        dead, other = both[number], both[1 - number]
        before = movers(server)
        dead.begins("turns 100000")
        other.begins(f"turns {TURNS}")
        dead.killed()
        other.says(f"turns {TURNS}")
        alone_moves_on(server, base, before, other)


@pytest.mark.parametrize("number", [0, 1])
def test_a_fault_of_one_device_is_no_matter_of_the_other(server: ServerProcess, number: int) -> None:
    base = at_rest()
    with engines(server) as both:
        hurt, other = both[number], both[1 - number]
        before = movers(server)
        hurt.does("turns 3")
        other.begins(f"turns {TURNS}")
        hurt.begins("fault")
        assert (said := hurt.hears()).startswith("fault "), said
        other.says(f"turns {TURNS}")
        hurt.killed()
        alone_moves_on(server, base, before, other)

        again = Engine(server, 3, environ=by_number(number))
        again.ready()
        assert again.device == hurt.device
        again.does("turns 5")
        assert again.ends() == 0
