# SPDX-License-Identifier: Apache-2.0
"""How blocks on a CUDA device are reached: a ring, the cache itself where a mover may map it, and a small stage.

An engine without Triton has no kernel of its own. Then a mover is the only way to its blocks.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvpool.client.ports import BlockPort, PageLocks
from kvpool.client.ringing import RingKeeper
from kvpool.config import ClientConfig
from kvpool.connector.mapped import MappedOffer
from kvpool.connector.memory import Reach, Ring
from kvpool.connector.ring import RingOffer
from kvpool.model.errors import ServerUnavailable
from kvpool.model.identity import Mode
from kvpool.transfer.cuda import CudaError
from kvpool.transfer.exports import CudaCache
from kvpool.transfer.planes import Layout, LayoutError
from kvpool.transfer.tensors import Storage
from kvpool.wire.messages import CacheFacts

if TYPE_CHECKING:
    from kvpool.connector.device import Device
    from kvpool.connector.moments import Moments

__all__ = ["NoKernel", "on_device"]

log = logging.getLogger("kvpool.connector")

_STAGE_BYTES: Final = 4 << 20


class NoKernel:
    """A ``BlockPort`` of an engine whose blocks a mover alone can reach: what comes any other way is lost."""

    locks: PageLocks | None = None

    def __init__(self, missing: str) -> None:
        self._missing = missing

    def gather(self, group: int, block_ids: NDArray[np.int64], out: memoryview) -> None:
        """See BlockPort."""
        del group, block_ids, out
        raise ServerUnavailable(self._missing)

    def scatter(self, group: int, block_ids: NDArray[np.int64], skip_blocks: int, data: memoryview) -> None:
        """See BlockPort."""
        del group, block_ids, skip_blocks, data
        raise ServerUnavailable(self._missing)


def on_device(layouts: Sequence[Layout], storages: Sequence[Storage], config: ClientConfig) -> Reach:
    """Prepare to move blocks; everything that is ever allocated on the device is allocated now.

    Raises:
        LayoutError: they cannot be reached; the text says what is missing.
    """
    missing = ""
    try:
        from kvpool.connector.device import Device  # noqa: PLC0415 - torch's CUDA half and Triton
    except ImportError as e:
        missing = f"its kernel needs Triton: {e}"
        if Mode.MAPPED not in config.modes:
            raise LayoutError(f"the cache is on a CUDA device, and {missing}; or allow mode mapped") from e
    try:
        from kvpool.connector.moments import Moments  # noqa: PLC0415 - torch's CUDA half

        moments = Moments(storages[0].device)
        if missing:
            cache = _exported(moments, layouts, storages, config, missing)
            return Reach(NoKernel(missing), (Mode.MAPPED,), cache, "", moments.now)
        device = Device(moments, layouts, storages)
        blocks: BlockPort = device.staged(_STAGE_BYTES)
        ring, why = _for_movers(device, moments, layouts, storages, config)
    except (CudaError, ImportError) as e:
        raise LayoutError(f"the engine's device cannot be used: {e}") from e
    return Reach(blocks, config.modes, ring, why, moments.now)


def _for_movers(
    device: "Device", moments: "Moments", layouts: Sequence[Layout], storages: Sequence[Storage], config: ClientConfig
) -> tuple[Ring | None, str]:
    """Return what movers may have, the first of its kinds in the order of modes, or why it is nothing."""
    why = ""
    for mode in config.modes:
        try:
            if mode is Mode.RING:
                offer = RingOffer(
                    device.ring(config.ring_slots, config.ring_slot_bytes, config.ring_keep_bytes), layouts
                )
                return Ring(offer, RingKeeper(offer)), ""
            if mode is Mode.MAPPED:
                return _exported(moments, layouts, storages, config, why), ""
        except (CudaError, LayoutError) as e:
            log.warning("kvpool: no mode %s on this device: %s", mode, e)
            why = why or str(e)
    return None, why


def _exported(
    moments: "Moments", layouts: Sequence[Layout], storages: Sequence[Storage], config: ClientConfig, why_no_ring: str
) -> Ring:
    """Let movers map the cache itself.

    Raises:
        CudaError: the driver does not say what it lies in.
    """
    with moments.entered():
        cache = CudaCache(moments.context, layouts, storages)
    facts = CacheFacts(
        device=moments.context.uuid, slot_bytes=config.ring_slot_bytes, slots=config.ring_slots, generation=0
    )
    offer = MappedOffer(cache, layouts, facts, why_no_ring)
    return Ring(offer, RingKeeper(offer))
