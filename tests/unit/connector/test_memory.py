# SPDX-License-Identifier: Apache-2.0
"""How the engine's blocks are reached, and what is refused by name instead of done slowly or wrongly."""

import sys
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from kvpool.client.ring_ports import RingWork
from kvpool.config import ClientConfig
from kvpool.connector.memory import reach
from kvpool.connector.ring import JoinedEngineRing
from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.planes import Layout, LayoutError, Plane
from kvpool.transfer.ring_ports import RingJob
from kvpool.transfer.tensors import Storage

LAYOUT = Layout(
    planes=(Plane(name="l", storage=0, offset=0, stride=64, block_bytes=64, packing="p"),), blocks=4, block_tokens=16
)
CONFIG = ClientConfig(server="ipc:///nowhere")


def storage(kind: str) -> Storage:
    return Storage(kind=kind, device=0, address=0, length=256)


@pytest.mark.behaviour("D112")
def test_without_its_kernel_a_device_is_refused_and_nothing_slower_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kvpool.connector.device", None)

    with pytest.raises(LayoutError, match="needs Triton"):
        reach([LAYOUT], [storage("cuda")], CONFIG)


def test_memory_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="in xpu memory"):
        reach([LAYOUT], [storage("xpu")], CONFIG)


class Ring:
    """An engine's ring whose loads last until they are let go."""

    def __init__(self) -> None:
        self.retired, self.closed = "", False
        self.begun, self.go = threading.Event(), threading.Event()

    def begin(self, direction: Direction, job: RingJob, ends_s: float) -> None:
        del direction, ends_s
        self.begun.set()
        self.go.wait(20.0)
        assert not self.closed, "its memory was let go of under a load"
        assert job.over is not None
        job.over()

    def gather(self, job: RingJob) -> None:
        del job
        self.begun.set()
        self.go.wait(20.0)
        assert not self.closed, "its memory was let go of under a gather"

    def retire(self, reason: str) -> None:
        self.retired = reason

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    made.go.set()


@pytest.mark.behaviour("R132")
@pytest.mark.parametrize("what", ["load", "gather"])
def test_a_ring_is_closed_after_its_last_move(ring: Ring, what: str) -> None:
    joined = JoinedEngineRing(ring, [LAYOUT])  # type: ignore[arg-type]
    loads: list[str] = []
    ids = np.zeros((1, 1), dtype=np.int64)
    move = joined.move(RingWork(group=0, block_ids=ids, chunks=[0], over=lambda: loads.append("over")))
    step = partial(joined.gather, move) if what == "gather" else partial(joined.load, move, b"g", 0.0)
    loading = threading.Thread(target=step)
    loading.start()
    assert ring.begun.wait(20.0)

    closing = threading.Thread(target=joined.close)
    closing.start()
    closing.join(0.1)

    assert (ring.retired, ring.closed) == ("closed", False)
    ring.go.set()
    for thread in (loading, closing):
        thread.join(20.0)
    assert ring.closed
    assert loads == (["over"] if what == "load" else [])
