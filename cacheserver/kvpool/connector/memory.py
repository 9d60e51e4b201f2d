# SPDX-License-Identifier: Apache-2.0
"""How the engine's blocks are reached: in host memory by the CPU, in device memory through a ring or a small stage."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.client.jobs import Moment
from kvpool.client.ports import BlockPort
from kvpool.client.ringing import RingKeeper
from kvpool.config import ClientConfig
from kvpool.connector.ring import RingOffer
from kvpool.model.identity import Mode
from kvpool.transfer.host import HostBlocks, map_storages
from kvpool.transfer.planes import Layout, LayoutError
from kvpool.transfer.tensors import Storage

__all__ = ["Reach", "Ring", "reach"]

log = logging.getLogger("kvpool.connector")

_STAGE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Ring:
    """The engine's ring, and who keeps it joined."""

    offer: RingOffer
    keeper: RingKeeper


def _no_moment() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Reach:
    """What moves the engine's blocks."""

    blocks: BlockPort
    """Chunk by chunk, for all ways but the ring."""

    ring: Ring | None = None
    why_no_ring: str = ""
    """For people; empty if there is a ring, or none was asked for."""

    moment: Callable[[], Moment | None] = _no_moment
    """Returns where the engine's device is now, in its own order. The engine's thread."""


def reach(layouts: Sequence[Layout], storages: Sequence[Storage], config: ClientConfig) -> Reach:
    """Prepare to move blocks; on a device everything that is ever allocated there is allocated now.

    Raises:
        LayoutError: this kind of memory cannot be reached; the text says what is missing.
    """
    kind = storages[0].kind
    if kind == "cpu":
        return Reach(HostBlocks(layouts, map_storages(storages)))
    if kind != "cuda":
        raise LayoutError(f"the cache is in {kind} memory; host memory and CUDA devices are supported")
    try:
        return _on_device(layouts, storages, config)
    except ImportError as e:
        raise LayoutError(f"the cache is on a CUDA device, and its kernel needs Triton: {e}") from e


def _on_device(layouts: Sequence[Layout], storages: Sequence[Storage], config: ClientConfig) -> Reach:
    from kvpool.connector.device import Device  # noqa: PLC0415 - torch's CUDA half and Triton, only where they are used
    from kvpool.transfer.cuda import CudaError  # noqa: PLC0415

    try:
        device = Device(layouts, storages)
        blocks = device.staged(_STAGE_BYTES)
    except CudaError as e:
        raise LayoutError(f"the engine's device cannot be used: {e}") from e
    if Mode.RING not in config.modes:
        return Reach(blocks, None, "", device.moment)
    try:
        made = device.ring(config.ring_slots, config.ring_slot_bytes, config.ring_keep_bytes)
    except (CudaError, LayoutError) as e:
        log.warning("kvpool: no ring on this device: %s", e)
        return Reach(blocks, None, str(e), device.moment)
    offer = RingOffer(made, layouts)
    return Reach(blocks, Ring(offer, RingKeeper(offer)), "", device.moment)
