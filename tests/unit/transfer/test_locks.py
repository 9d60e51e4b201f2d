# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002, N802 - signatures of the driver
"""Locks of pages for copy engines: what the driver is asked, what is reached, what a refusal leaves."""

import logging

import pytest
from tests.fakes.lazy_driver import LazyDriver

from kvpool.transfer import cuda
from kvpool.transfer.cuda import Context
from kvpool.transfer.locks import CudaLocks

READ_ONLY, ERROR = 8, 719


class Driver(LazyDriver):
    """Remembers the calls that a thread's state hangs on, too."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, object]] = []

    def cuMemHostRegister_v2(self, address: int, length: int, flags: int) -> int:
        self.asked.append(("register", flags))
        return ERROR if flags & self.refused else 0

    def cuMemHostUnregister(self, address: int) -> int:
        self.asked.append(("unregister", address))
        return ERROR if self.refused else 0

    def cuCtxPushCurrent_v2(self, _handle: int) -> None:
        self.asked.append(("push", None))

    def cuCtxPopCurrent_v2(self, _handle: object) -> None:
        self.asked.append(("pop", None))

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> None:
        self.asked.append(("mode", mode._obj.value))  # type: ignore[attr-defined]
        mode._obj.value = 0  # type: ignore[attr-defined]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda, "_driver", lambda: made)
    return made


@pytest.fixture
def locks(driver: Driver) -> CudaLocks:
    del driver
    return CudaLocks(Context(0, 1))


def test_a_part_is_reached_if_all_of_it_is_in_one_lock(locks: CudaLocks) -> None:
    assert locks.lock(4096, 8192, writable=True)
    assert locks.lock(12288, 4096, writable=True)

    assert locks.reach(4096, 8192)
    assert locks.reach(8000, 100)
    assert not locks.reach(8192, 8192), "a copy over the end of a registration fails"
    assert not locks.reach(4095, 2)
    locks.unlock(4096)
    assert not locks.reach(4096, 1)
    assert locks.reach(12288, 4096)


def test_threads_are_left_as_they_were_and_the_device_writes_only_where_this_process_may(
    driver: Driver, locks: CudaLocks
) -> None:
    locks.lock(4096, 4096, writable=True)
    locks.lock(8192, 4096, writable=False)

    around = [("push", None), ("mode", 2)], [("mode", 0), ("pop", None)]
    assert driver.asked == [
        *around[0], ("register", 0), *around[1], *around[0], ("register", READ_ONLY), *around[1]
    ]  # fmt: skip


def test_a_refusal_is_logged_once_for_each_kind(
    driver: Driver, locks: CudaLocks, caplog: pytest.LogCaptureFixture
) -> None:
    driver.refused = READ_ONLY

    assert locks.lock(4096, 4096, writable=True)
    for address in (8192, 12288):
        assert not locks.lock(address, 4096, writable=False)
        assert not locks.reach(address, 1)

    assert [r.levelno for r in caplog.records if "cuMemHostRegister" in r.message] == [logging.WARNING]


def test_memory_that_stays_registered_is_not_reached_any_more(
    driver: Driver, locks: CudaLocks, caplog: pytest.LogCaptureFixture
) -> None:
    locks.lock(4096, 4096, writable=True)
    driver.refused = READ_ONLY

    locks.unlock(4096)

    assert not locks.reach(4096, 1)
    assert "stays page-locked" in caplog.text
