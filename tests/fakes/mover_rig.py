# SPDX-License-Identifier: Apache-2.0
"""A ring, a mover process with a fake device, an arena of files, and the server's part played by the test."""

import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from tests.fakes.waiting_ring import WaitingRing

from kvpool.model.slots import CHECK, PLACEMENT, Disposition
from kvpool.transfer.mover.messages import Direction, Revoked, Ring, Start
from kvpool.transfer.mover.supervision import Mover, MoverLimits, MoverState
from kvpool.transfer.ring_ports import EngineDevice

COMMAND = (sys.executable, str(Path(__file__).with_name("mover_process.py")))
SECRET = b"s" * 16
PATIENCE_S = 20.0


class MoverRig:
    """What one test needs; a context manager."""

    def __init__(
        self,
        folder: Path,
        ring: Ring,
        *,
        regions: Sequence[int] = (1 << 20,),
        command: Sequence[str] = COMMAND,
        listen: str = "",
        limits: MoverLimits | None = None,
        client_pid: int = 0,
        memory: Path | None = None,
    ) -> None:
        start = Start(ring=ring, secret=SECRET, listen=listen or f"unix:{folder / 'mover.sock'}")
        self.mover = Mover(command, start, client_pid or os.getpid(), time.monotonic(), limits)
        self.regions = []
        for number, length in enumerate(regions):
            path = (memory or folder) / f"region.{number}"
            path.write_bytes(b"\xdd" * length)
            self.regions.append(path)
            self.mover.give_segment(number, os.open(path, os.O_RDWR), length)
        self.revoked: list[Revoked] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.mover.kill("the test is over")
        self.until(lambda: self.mover.state is MoverState.REAPED)

    def until(self, condition: Callable[[], bool]) -> None:
        """Be the server's loop until the condition holds."""
        ends_s = time.monotonic() + PATIENCE_S
        pause = select.poll()
        while not condition():
            assert time.monotonic() < ends_s, f"waited too long; the mover is {self.mover.state}: {self.mover.reason}"
            self.revoked += self.mover.turn(time.monotonic())
            pause.poll(2)

    def ready(self) -> "MoverRig":
        self.until(lambda: self.mover.state is not MoverState.STARTING)
        assert self.mover.state is MoverState.READY, self.mover.reason
        return self

    def join(self, device: EngineDevice, secret: bytes = SECRET) -> WaitingRing:
        return WaitingRing(device, self.mover.address, secret, time.monotonic() + PATIENCE_S)

    def grant(
        self,
        name: bytes,
        direction: Direction,
        places: Sequence[tuple[int, int]],
        length: int,
        checks: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """Grant chunks at (region, offset), with checksums (kind and bytes) to make or to verify."""
        rows = np.zeros(len(places), dtype=PLACEMENT)
        rows["memory"] = [region for region, _ in places]
        rows["offset"] = [offset for _, offset in places]
        rows["length"] = length
        rows["disposition"] = Disposition.WRITE
        self.mover.grant(name, direction, rows, np.array(list(checks), dtype=CHECK).tobytes())
        self.flush()

    def flush(self) -> None:
        self.until(lambda: not self.mover.wants_write)

    def bytes_at(self, region: int, offset: int, length: int) -> bytes:
        with self.regions[region].open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def spoil(self, region: int, offset: int) -> None:
        """Turn one byte over."""
        byte = self.bytes_at(region, offset, 1)
        with self.regions[region].open("r+b") as file:
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
