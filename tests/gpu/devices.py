# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a device, made ready for tests."""

from collections.abc import Sequence
from typing import Any

from kvpool.transfer.planes import Layout


def device_groups(layouts: Sequence[Layout], addresses: Sequence[int]) -> tuple[Any, Any]:
    """The current context, and the groups over storages at *addresses*."""
    import torch

    from kvpool.transfer.cuda import Context
    from kvpool.transfer.kernels.groups import PagedGroup, prepare

    torch.cuda.synchronize()
    context = Context.current()
    return context, prepare(context, [PagedGroup(layout, addresses) for layout in layouts])


def engine_device(layout: Layout, storages: Sequence[Any], slot_bytes: int, per_chunk: int, slots: int = 3) -> Any:
    """A ring over the tensors of one group."""
    from kvpool.transfer.kernels.paged import CudaEngineDevice

    context, groups = device_groups([layout], [s.data_ptr() for s in storages])
    device = CudaEngineDevice(context, groups, slots, slot_bytes)
    device.fit([per_chunk])
    return device
