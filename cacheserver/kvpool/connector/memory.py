# SPDX-License-Identifier: Apache-2.0
"""How the engine's blocks are reached: in host memory by the CPU, in device memory as ``connector.gpu`` says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.client.jobs import Moment
from kvpool.client.ports import BlockPort
from kvpool.client.ringing import RingKeeper
from kvpool.config import ClientConfig
from kvpool.connector.mapped import MappedOffer
from kvpool.connector.ring import RingOffer
from kvpool.model.identity import Mode
from kvpool.transfer.host import HostBlocks, map_storages
from kvpool.transfer.planes import Layout, LayoutError
from kvpool.transfer.tensors import Storage

__all__ = ["Reach", "Ring", "reach"]


@dataclass(frozen=True, slots=True)
class Ring:
    """What movers may have of the engine, its ring or its cache, and who keeps it joined."""

    offer: RingOffer | MappedOffer
    keeper: RingKeeper


def _no_moment() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Reach:
    """What moves the engine's blocks."""

    blocks: BlockPort
    """Chunk by chunk, for all ways but those of movers."""

    modes: tuple[Mode, ...]
    """What it can do of what may be done, in order of preference."""

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
        return Reach(HostBlocks(layouts, map_storages(storages)), config.modes)
    if kind != "cuda":
        raise LayoutError(f"the cache is in {kind} memory; host memory and CUDA devices are supported")
    from kvpool.connector.gpu import on_device  # noqa: PLC0415 - it makes a Reach

    return on_device(layouts, storages, config)
