# SPDX-License-Identifier: Apache-2.0
"""What is undone when a call of the driver fails; the driver is a table of functions that answer as the test says."""

from collections.abc import Callable

import pytest

from kvpool.transfer import cuda
from kvpool.transfer.cuda import Context, CudaError

OUT_OF_MEMORY = 2


class Driver(dict[str, Callable[..., int]]):
    """Counts what is called; each call succeeds but those in ``codes``."""

    def __init__(self, **codes: int) -> None:
        super().__init__()
        self.codes, self.called = codes, []

    def __missing__(self, name: str) -> Callable[..., int]:
        def call(*_: object) -> int:
            self.called.append(name)
            return self.codes.get(name, 0)

        return call


def made(monkeypatch: pytest.MonkeyPatch, **codes: int) -> tuple[Context, Driver]:
    driver = Driver(**codes)
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    context = Context(0, 1)
    driver.called.clear()
    return context, driver


@pytest.mark.behaviour("R135")
def test_memory_that_cannot_be_exported_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    context, driver = made(monkeypatch, cuIpcGetMemHandle=OUT_OF_MEMORY)

    with pytest.raises(CudaError, match="cuIpcGetMemHandle"):
        context.allocate_exported(1 << 20)

    assert [name for name in driver.called if name.startswith("cuMem")] == ["cuMemAlloc_v2", "cuMemFree_v2"]


def test_exported_memory_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    context, driver = made(monkeypatch)

    assert len(context.allocate_exported(1 << 20)[1]) == 64
    assert driver.called == ["cuMemAlloc_v2", "cuIpcGetMemHandle"]
