# SPDX-License-Identifier: Apache-2.0
"""What an engine's device is kept busy with while chunks move, and how much of it gets done."""

import threading
import time
from abc import ABC, abstractmethod
from typing import Final

import torch

__all__ = ["Copies", "Products", "Work"]

_SIDE: Final = 8192
_BATCH: Final = 10
_COPY_BYTES: Final = 1 << 30
_LEAST: Final = 2


class Work(ABC):
    """A thread that keeps the device busy while switched on."""

    unit: str

    def __init__(self) -> None:
        self._on, self._stop = threading.Event(), False
        self._done: list[float] = []
        self._thread = threading.Thread(target=self._run, name="bench-work", daemon=True)
        self._thread.start()

    @abstractmethod
    def prepare(self) -> None:
        """Allocate."""

    @abstractmethod
    def launch(self) -> None:
        """Put one batch into the current stream."""

    @abstractmethod
    def amount(self) -> float:
        """Say how much one batch is, in ``unit`` times seconds."""

    def switch(self, *, on: bool) -> None:
        """Begin, or end after the batch that runs."""
        (self._on.set if on else self._on.clear)()

    def rate(self, began_s: float, ended_s: float) -> float:
        """Return what was done between two times, in ``unit``."""
        inside = [t for t in self._done if began_s <= t <= ended_s]
        return 0.0 if len(inside) < _LEAST else (len(inside) - 1) * self.amount() / (inside[-1] - inside[0])

    def close(self) -> None:
        """End the thread."""
        self._stop = True
        self._on.set()
        self._thread.join()

    def _run(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.prepare()
            while self._on.wait() and not self._stop:
                self.launch()
                stream.synchronize()
                self._done.append(time.monotonic())


class Products(Work):
    """Matrix products, 8192-cubed in bf16."""

    unit = "TFLOP/s"

    def prepare(self) -> None:
        """See Work."""
        self._a = torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16)
        self._b, self._c = torch.randn_like(self._a), torch.empty_like(self._a)

    def launch(self) -> None:
        """See Work."""
        for _ in range(_BATCH):
            torch.matmul(self._a, self._b, out=self._c)

    def amount(self) -> float:
        """See Work."""
        return _BATCH * 2 * _SIDE**3 / 1e12


class Copies(Work):
    """Copies within device memory: bound by it, as decoding is."""

    unit = "GB/s"

    def prepare(self) -> None:
        """See Work."""
        self._a = torch.randint(0, 256, (_COPY_BYTES,), device="cuda", dtype=torch.uint8)
        self._b = torch.empty_like(self._a)

    def launch(self) -> None:
        """See Work."""
        for _ in range(_BATCH):
            torch.add(self._a, 1, out=self._b)

    def amount(self) -> float:
        """See Work."""
        return _BATCH * 2 * _COPY_BYTES / 1e9
