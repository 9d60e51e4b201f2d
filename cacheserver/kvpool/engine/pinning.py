# SPDX-License-Identifier: Apache-2.0
"""Pins of lookups: every one is noted with the slot, with the client and with the lease, or with none of them."""

import numpy as np
from numpy.typing import NDArray

from kvpool.engine.clients import Client
from kvpool.engine.core import Core
from kvpool.index.leases import Holding, LookupLease

__all__ = ["pin_rows", "release_rows", "release_share", "room_bytes"]

Rows = NDArray[np.int64]


def pin_rows(core: Core, lease: LookupLease, holding: Holding, rows: Rows, *, use: bool = False) -> None:
    """Pin readable chunks once for each reader; with *use* the policy learns that they are used."""
    if not len(rows):
        return
    slots = holding.slots[rows]
    core.index.pin(slots, lease.readers)
    lease.ledger.pin(slots, lease.readers, holding.slot_bytes)
    holding.shares[rows] = lease.readers
    if use:
        core.index.used(slots, rows.astype(np.uint32))


def release_rows(core: Core, lease: LookupLease, holding: Holding, rows: Rows) -> None:
    """Release all shares of some pinned chunks."""
    _release(core, lease, holding, rows, holding.shares[rows])


def release_share(core: Core, lease: LookupLease, holding: Holding, rows: Rows) -> None:
    """Release one reader's share of some pinned chunks."""
    _release(core, lease, holding, rows, np.ones(len(rows), dtype=np.int32))


def room_bytes(core: Core, client: Client) -> tuple[int, int]:
    """Return how many more bytes all lookups together, and this client's, may pin."""
    total = core.l1_bytes
    limits = core.config.limits
    everywhere = int(total * limits.pinned_share) - core.index.pinned_bytes
    return everywhere, int(total * limits.pinned_client_share) - client.ledger.bytes


def _release(core: Core, lease: LookupLease, holding: Holding, rows: Rows, counts: NDArray[np.int32]) -> None:
    if not len(rows):
        return
    slots = holding.slots[rows]
    holding.shares[rows] -= counts
    lease.ledger.unpin(slots, counts, holding.slot_bytes)
    core.index.unpin(slots, counts)
