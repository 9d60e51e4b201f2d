# SPDX-License-Identifier: Apache-2.0
"""The engine's tensors as plain numbers: which storages they lie in, where in them, and what kind of memory that is."""

from dataclasses import dataclass
from typing import Any

from kvpool.transfer.planes import LayoutError, PagedTensor

__all__ = ["Storage", "describe_tensors"]


@dataclass(frozen=True, slots=True)
class Storage:
    """One stretch of memory that an engine's tensors lie in; it stays valid as long as the engine keeps them."""

    kind: str
    """As torch names it: ``cpu``, ``cuda`` and so on."""

    device: int
    """Number of the device as this process counts them; 0 for host memory."""

    address: int
    length: int


def describe_tensors(tensors: dict[str, Any], packing: dict[str, str]) -> tuple[list[PagedTensor], list[Storage]]:
    """Describe the engine's tensors and the distinct storages that they lie in.

    Args:
        tensors: layer name to a torch tensor, in the layers' canonical order.
        packing: layer name to what decides how its kernel arranges a block's bytes.

    Raises:
        LayoutError: they are not all in one kind of memory, or on one device.
    """
    numbers: dict[int, int] = {}
    storages: list[Storage] = []
    described = []
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in numbers:
            numbers[storage.data_ptr()] = len(storages)
            kind = tensor.device.type
            number = 0 if kind == "cpu" else tensor.device.index
            storages.append(Storage(kind, number, storage.data_ptr(), storage.nbytes()))
        item = tensor.element_size()
        described.append(
            PagedTensor(
                name=name,
                storage=numbers[storage.data_ptr()],
                offset=tensor.storage_offset() * item,
                shape=tuple(tensor.shape),
                strides=tuple(step * item for step in tensor.stride()),
                item_bytes=item,
                packing=packing[name],
            )
        )
    places = {(s.kind, s.device) for s in storages}
    if len(places) > 1:
        raise LayoutError(f"the cache lies in several places: {', '.join(sorted(f'{k}:{d}' for k, d in places))}")
    return described, storages
