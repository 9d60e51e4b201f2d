# SPDX-License-Identifier: Apache-2.0
"""The engine's device over a driver that runs everything as late as it may."""

import numpy as np
import pytest
from tests.fakes.staged_engine import staging

from kvpool.transfer import cuda
from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.planes import Layout, Plane
from kvpool.transfer.ring_ports import RingJob

BLOCKS, WHOLE, SIZE = 32, 4, 96
PLANE = Plane(name="l", storage=0, offset=0, stride=SIZE, block_bytes=SIZE, packing="p")
LAYOUT = Layout(planes=(PLANE,), blocks=BLOCKS, block_tokens=16)


@pytest.mark.behaviour("D030")
@pytest.mark.parametrize("direction", list(Direction))
def test_nothing_of_one_direction_runs_before_what_the_other_waits_for(direction: Direction) -> None:
    cache = np.zeros(BLOCKS * SIZE, dtype=np.uint8)
    ids = np.arange(WHOLE, dtype=np.int64)[None]
    with staging() as (driver, _):
        from kvpool.transfer.kernels.groups import PagedGroup, prepare
        from kvpool.transfer.kernels.paged import CudaEngineDevice

        context = cuda.Context(0, 1)
        groups = prepare(context, [PagedGroup(LAYOUT, [cache.ctypes.data])])
        device = CudaEngineDevice(context, groups, slots=2, slot_bytes=WHOLE * SIZE)
        device.fit([WHOLE])
        driver.ran.clear()
        for way in (*(d for d in Direction if d is not direction), direction):
            job = RingJob(group=0, grant=b"g", ids=ids, chunks=range(1))
            (turn,) = device.turns(0, job.chunks)
            device.launch(way, 0, job, turn)

        device.wait(direction, 0)

        kernels = [name for name in driver.ran if name in {"gather", "scatter"}]
        assert kernels == ["gather" if direction is Direction.STORE else "scatter"]
        device.free()
