# SPDX-License-Identifier: Apache-2.0
"""An engine that exports its cache, whose memory is files; jobs can be held at a gate as those of other fakes."""

import tempfile
from pathlib import Path

from tests.fakes.blocks import POISON
from tests.fakes.clients import CHUNK_BLOCKS
from tests.fakes.mapped_device import FileCache
from tests.fakes.ring_device import UUID
from tests.fakes.ring_engine import MoverEngine

from kvpool.connector.mapped import MappedOffer
from kvpool.model.identity import Mode
from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.planes import Layout, Plane
from kvpool.wire.messages import CacheFacts


class GatedMover:
    """Jobs pass the gate of the blocks before the mover hears of them, and are counted there."""

    def __init__(self, mover, blocks):
        self._mover, self._blocks = mover, blocks

    def __getattr__(self, name):
        return getattr(self._mover, name)

    def begin(self, direction, job, ends_s):
        ids = job.ids[list(job.chunks)]
        self._blocks.pass_gate(ids[ids >= 0])
        then = job.over

        def over():
            moved = 0 if job.lost is None else len(job.chunks) - len(job.lost)
            self._blocks.gathered += moved * (direction is Direction.STORE)
            self._blocks.scattered += moved * (direction is Direction.LOAD)
            then()

        job.over = over
        self._mover.begin(direction, job, ends_s)


class GatedOffer(MappedOffer):
    blocks = None

    def join(self, address, secret, ends_s, retired):
        joined = super().join(address, secret, ends_s, retired)
        joined._ring = GatedMover(joined._ring, self.blocks)
        return joined


class MappedEngine(MoverEngine):
    """See MoverEngine. Its mover's slots have a size that no chunk's is a multiple of."""

    def __init__(self, address, *modes, slots=3, virtual=True, device=UUID, **options):
        super().__init__(address, *(modes or (Mode.MAPPED, Mode.STREAMED)), **options)
        self.folder = Path(tempfile.mkdtemp())
        blocks, block_bytes = self.blocks.memory.shape
        plane = Plane(name="l", storage=0, offset=0, stride=block_bytes, block_bytes=block_bytes, packing="p")
        layout = Layout(planes=(plane,), blocks=blocks, block_tokens=2)
        self.cache = FileCache(self.folder, [(layout, CHUNK_BLOCKS)], virtual=virtual)
        self.blocks.memory = self.cache.storages[0].reshape(blocks, block_bytes)
        self.blocks.memory[:] = POISON
        facts = CacheFacts(device=device, slot_bytes=int(2.5 * CHUNK_BLOCKS * block_bytes), slots=slots, generation=0)
        offer = GatedOffer(self.cache, [layout], facts, "")
        offer.blocks = self.blocks
        self.use(offer)
