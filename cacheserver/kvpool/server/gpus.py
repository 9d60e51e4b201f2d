# SPDX-License-Identifier: Apache-2.0
"""Looks which GPUs this server may use, again and again: they appear late and can vanish from a running container.

The driver is asked on a thread of its own and let go after each look, so that neither a driver that does not answer
holds up the loop, nor does the server hold up a replacement of the driver.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.transfer.mover.inventory import Gpu, InventoryError

__all__ = ["GpuSight", "GpuWatch"]

_END_S: Final = 0.5
"""At the end the thread gets this long; one that is inside the driver dies with the process."""


@dataclass(frozen=True, slots=True)
class GpuSight:
    """What was seen last."""

    count: int | None = None
    """GPUs; None before the first look ended."""

    reason: str = "NotLooked"
    """NoGPUVisible, DriverSilent, MIGUnsupported (each of them is cut into instances), NotLooked; empty if all is well.
    """

    detail: str = ""
    """The same for people."""

    @property
    def trouble(self) -> str:
        """Why the server is not ready; empty if it is. Instances serve by other ways than the ring."""
        if self.reason in ("", "MIGUnsupported"):
            return ""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class GpuWatch:
    """Keeps looking until ``close``. Any thread may ask for ``sight``.

    Args:
        look: returns the devices, or raises InventoryError; may take as long as the driver likes.
        every_s: rest between two looks; a look that takes three times as long means that the driver is silent.
        clock: monotonic seconds.
    """

    def __init__(self, look: Callable[[], Sequence[Gpu]], every_s: float, clock: Callable[[], float]) -> None:
        self._look, self._every_s, self._clock = look, every_s, clock
        self._stop = threading.Event()
        self._seen = GpuSight()
        self._begun_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
        self._thread.start()

    def sight(self) -> GpuSight:
        """Return what was seen last; a look that does not end counts against the driver."""
        begun_s = self._begun_s
        if begun_s is not None and self._clock() - begun_s > 3 * self._every_s:
            return GpuSight(self._seen.count, "DriverSilent", "the NVIDIA driver does not answer")
        return self._seen

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._begun_s = self._clock()
            self._seen = self._once()
            self._begun_s = None
            self._stop.wait(self._every_s)

    def _once(self) -> GpuSight:
        try:
            found = self._look()
        except InventoryError as e:
            return GpuSight(0, "NoGPUVisible", str(e))
        if not found:
            return GpuSight(0, "NoGPUVisible", "the NVIDIA driver shows no device to this container")
        if all(g.mig for g in found):
            return GpuSight(len(found), "MIGUnsupported", "every GPU is cut into instances")
        return GpuSight(len(found), "")
