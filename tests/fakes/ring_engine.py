# SPDX-License-Identifier: Apache-2.0
"""An engine with a ring whose device is a file; its blocks can be held at a gate as those of other fakes."""

import shutil
import tempfile
from pathlib import Path

from tests.fakes.clients import CHUNK_BLOCKS, FakeEngine, until
from tests.fakes.ring_device import FakeEngineDevice, make_ring

from kvpool.client.link import Link
from kvpool.client.ringing import RingKeeper
from kvpool.client.worker import WorkerAdapter
from kvpool.connector.ring import RingOffer
from kvpool.model.identity import ClientKind, Mode
from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.planes import Layout, Plane


class GatedDevice(FakeEngineDevice):
    """Kernels pass the gate of the blocks, and are counted there."""

    blocks = None

    def _move(self, direction, ids, turn, slot):
        used = ids[ids >= 0]
        self.blocks.pass_gate(used)
        super()._move(direction, ids, turn, slot)
        if turn.part is self._parts[0]:
            self.blocks.gathered += direction is Direction.STORE
            self.blocks.scattered += direction is Direction.LOAD


class MoverEngine(FakeEngine):
    """See FakeEngine. Its chunks go through a mover."""

    def use(self, offer):
        """Let movers have what is offered."""
        self.offer = offer
        self.rings = RingKeeper(offer)
        base = self.worker_link.registration

        def accept(_welcome):
            self.worker_link.registration = self.rings.equip(base)

        self.worker.close(1.0)
        self.worker_link.close(0.0)
        self.worker_link = Link(self.config, ClientKind.WORKER, on_state=self.rings.on_state, accept=accept)
        self.worker = WorkerAdapter(self.worker_link, self.blocks, self.config, rings=self.rings)

    def __enter__(self):
        self.rings.begin(self.worker_link)
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        shutil.rmtree(self.folder)

    def healthy(self, timeout_s=60.0):
        super().healthy(timeout_s)
        until(lambda: not self.rings.reason, timeout_s)
        return self


class RingEngine(MoverEngine):
    """See MoverEngine. Its ring has slots that no chunk's size is a multiple of."""

    def __init__(self, address, *modes, slots=3, slot_bytes=0, **options):
        super().__init__(address, *(modes or (Mode.RING, Mode.STREAMED)), **options)
        self.folder = Path(tempfile.mkdtemp())
        memory = self.blocks.memory
        block_bytes = memory.shape[1]
        plane = Plane(name="l", storage=0, offset=0, stride=block_bytes, block_bytes=block_bytes, packing="p")
        layout = Layout(planes=(plane,), blocks=len(memory), block_tokens=2)
        ring = make_ring(self.folder / "ring", slots, slot_bytes or int(2.5 * CHUNK_BLOCKS * block_bytes))
        self.device = GatedDevice(ring, layout, [memory.reshape(-1)], CHUNK_BLOCKS)
        self.device.blocks = self.blocks
        self.use(RingOffer(self.device, [layout]))
