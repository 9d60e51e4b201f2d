# SPDX-License-Identifier: Apache-2.0
"""An engine whose paged cache is page-locked memory that kernels reach: tests compare it as an array of NumPy.

In mode mapped it is device memory, since no other can be exported; what looks like an array copies it at each access.
"""

import ctypes

import numpy as np
from tests.fakes.blocks import POISON, StagedNumpyBlocks
from tests.fakes.clients import CHUNK_BLOCKS, FakeEngine
from tests.fakes.mapped_engine import GatedOffer
from tests.gpu.devices import device_groups
from tests.gpu.waiting import PATIENCE_S, until

from kvpool.client.link import Link
from kvpool.client.ringing import RingKeeper
from kvpool.client.worker import WorkerAdapter
from kvpool.connector.ring import RingOffer
from kvpool.model.identity import ClientKind, Mode
from kvpool.transfer.cuda import Context
from kvpool.transfer.exports import CudaCache
from kvpool.transfer.mover.messages import Direction
from kvpool.transfer.planes import Layout, Plane
from kvpool.transfer.tensors import Storage
from kvpool.wire.messages import CacheFacts


class LockedBlocks(StagedNumpyBlocks):
    """Blocks in page-locked memory."""

    def __init__(self, context: Context, blocks: int, block_bytes: int) -> None:
        super().__init__(1, 1)
        self.address = context.allocate_host(blocks * block_bytes)
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * (blocks * block_bytes)).from_address(self.address))
        self.memory = flat.reshape(blocks, block_bytes)
        self.memory[:] = POISON


class DeviceArray:
    """As much of an array as tests of a cache need."""

    def __init__(self, *shape: int) -> None:
        import torch

        self.tensor, self.shape = torch.empty(shape, dtype=torch.uint8, device="cuda"), shape

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype=None, copy=None):
        del dtype, copy
        return self.tensor.cpu().numpy()

    def __getitem__(self, index):
        return self.tensor.cpu().numpy()[index]

    def __setitem__(self, index, value) -> None:
        import torch

        changed = self.tensor.cpu().numpy()
        changed[index] = np.asarray(value)
        self.tensor.copy_(torch.from_numpy(changed))
        torch.cuda.synchronize()


class DeviceBlocks(StagedNumpyBlocks):
    """Blocks in device memory."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        super().__init__(1, 1)
        self.memory = memory = DeviceArray(blocks, block_bytes)
        memory[:] = POISON
        self.address = memory.tensor.data_ptr()


class GatedDevice:
    """Launches of a ring's kernels pass the gate of the blocks, and are counted there."""

    def __init__(self, device, blocks) -> None:
        self._device, self._blocks = device, blocks

    def __getattr__(self, name):
        return getattr(self._device, name)

    @property
    def ring(self):
        return self._device.ring

    @ring.setter
    def ring(self, value) -> None:
        self._device.ring = value

    def launch(self, direction, slot, job, turn) -> None:
        used = job.ids[list(turn.chunks)]
        self._blocks.pass_gate(used[used >= 0])
        self._device.launch(direction, slot, job, turn)
        if not turn.part.offset:
            self._blocks.gathered += len(turn.chunks) * (direction is Direction.STORE)
            self._blocks.scattered += len(turn.chunks) * (direction is Direction.LOAD)


class GpuEngine(FakeEngine):
    """See FakeEngine; every way on a device. The ring has slots that no chunk's size is a multiple of."""

    def __init__(self, address, mode, *, blocks=256, block_bytes=16 << 10, slots=3, **options) -> None:
        from kvpool.transfer.kernels.paged import CudaEngineDevice
        from kvpool.transfer.kernels.staged import StagedBlocks

        super().__init__(address, mode, blocks=blocks, block_bytes=block_bytes, **options)
        self.worker.close(1.0)
        self.worker_link.close(0.0)
        context, _ = device_groups([], [])
        mapped = mode is Mode.MAPPED
        self.blocks = DeviceBlocks(blocks, block_bytes) if mapped else LockedBlocks(context, blocks, block_bytes)
        plane = Plane(name="l", storage=0, offset=0, stride=block_bytes, block_bytes=block_bytes, packing="p")
        layout = Layout(planes=(plane,), blocks=blocks, block_tokens=2)
        _, groups = device_groups([layout], [self.blocks.address])
        self.blocks.staged = StagedBlocks(context, groups, 3 * block_bytes)
        base, self.rings, self.device = self.worker_link.registration, None, None
        slot_bytes = -(-int(2.5 * CHUNK_BLOCKS * block_bytes) // 256) * 256
        if mode is Mode.RING:
            self.device = CudaEngineDevice(context, groups, slots, slot_bytes)
            offer = RingOffer(GatedDevice(self.device, self.blocks), [layout])
            offer.fit([CHUNK_BLOCKS])
            self.rings = RingKeeper(offer)
        if mapped:
            storage = Storage("cuda", 0, self.blocks.address, blocks * block_bytes)
            facts = CacheFacts(device=context.uuid, slot_bytes=slot_bytes, slots=slots, generation=0)
            gated = GatedOffer(CudaCache(context, [layout], [storage]), [layout], facts, "")
            gated.blocks = self.blocks
            gated.fit([CHUNK_BLOCKS])
            self.rings = RingKeeper(gated)

        def accept(_welcome) -> None:
            self.worker_link.registration = self.rings.equip(base) if self.rings else base

        told = self.rings.on_state if self.rings else None
        self.worker_link = Link(self.config, ClientKind.WORKER, on_state=told, accept=accept)
        self.worker = WorkerAdapter(self.worker_link, self.blocks, self.config, rings=self.rings)

    def __enter__(self):
        if self.rings:
            self.rings.begin(self.worker_link)
        return super().__enter__()

    def healthy(self, timeout_s=PATIENCE_S):
        super().healthy(timeout_s)
        until(
            lambda: not self.rings or not self.rings.reason,
            told=lambda: f"no ring: {self.rings.reason}; {self.worker_link.state}",
            timeout_s=timeout_s,
        )
        return self
