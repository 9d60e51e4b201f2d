# SPDX-License-Identifier: Apache-2.0
"""What a server says about the node's GPUs, with a driver that a test can take away or make silent."""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from kvpool.server.gpus import GpuSight, GpuWatch
from kvpool.transfer.mover.inventory import Gpu, InventoryError

WAIT_S = 5.0
EVERY_S = 0.01


def gpu(number: int, *, mig: bool = False) -> Gpu:
    return Gpu(uuid=f"GPU-{number}", name="H200", memory_bytes=1, free_bytes=1, mig=mig)


class Driver:
    """Answers each look with what the test put in; then the look before that was taken in."""

    def __init__(self) -> None:
        self._answers: SimpleQueue[Callable[[], tuple[Gpu, ...]]] = SimpleQueue()
        self._asked: SimpleQueue[None] = SimpleQueue()

    def look(self) -> tuple[Gpu, ...]:
        self._asked.put(None)
        return self._answers.get(timeout=WAIT_S)()

    def answers(self, *found: Gpu) -> None:
        """Wait until the driver is asked, answer, and wait until it is asked again."""
        self._asked.get(timeout=WAIT_S)
        self._answers.put(lambda: found)
        self._asked.get(timeout=WAIT_S)
        self._asked.put(None)

    def fails(self, text: str) -> None:
        def fail() -> tuple[Gpu, ...]:
            raise InventoryError(text)

        self._asked.get(timeout=WAIT_S)
        self._answers.put(fail)
        self._asked.get(timeout=WAIT_S)
        self._asked.put(None)

    def end(self) -> None:
        self._answers.put(tuple)


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.end()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def watch(driver: Driver, now: list[float]) -> Iterator[GpuWatch]:
    made = GpuWatch(driver.look, EVERY_S, lambda: now[0])
    yield made
    driver.end()
    made.close()


def test_devices_may_come_late_and_go(watch: GpuWatch, driver: Driver) -> None:
    assert watch.sight() == GpuSight(None, "NotLooked")

    driver.fails("no NVIDIA driver is visible")
    assert watch.sight() == GpuSight(0, "NoGPUVisible", "no NVIDIA driver is visible")
    driver.answers()
    assert watch.sight().trouble.startswith("NoGPUVisible: ")
    driver.answers(gpu(0), gpu(1))
    assert not watch.sight().trouble
    assert watch.sight() == GpuSight(2, "")
    driver.fails("NVML: GPU is lost")
    assert (watch.sight().count, watch.sight().reason) == (0, "NoGPUVisible")


def test_instances_alone_are_not_supported(watch: GpuWatch, driver: Driver) -> None:
    driver.answers(gpu(0, mig=True), gpu(1))
    assert watch.sight().reason == ""
    driver.answers(gpu(0, mig=True))
    assert watch.sight() == GpuSight(1, "MIGUnsupported", "every GPU is cut into instances")
    assert not watch.sight().trouble, "they serve by other ways"


def test_a_driver_that_does_not_answer_is_silent_and_holds_nobody_up(
    watch: GpuWatch, driver: Driver, now: list[float]
) -> None:
    driver.answers(gpu(0))
    now[0] += 3 * EVERY_S
    assert watch.sight().reason == ""
    now[0] += 1
    assert (watch.sight().count, watch.sight().reason) == (1, "DriverSilent")

    driver.answers(gpu(0))
    assert watch.sight() == GpuSight(1, "")


def test_closing_does_not_wait_for_the_driver() -> None:
    inside, free = threading.Event(), threading.Event()

    def hang() -> tuple[Gpu, ...]:
        inside.set()
        free.wait(WAIT_S)
        return ()

    watch = GpuWatch(hang, EVERY_S, lambda: 0.0)
    assert inside.wait(WAIT_S)
    watch.close()
    free.set()
