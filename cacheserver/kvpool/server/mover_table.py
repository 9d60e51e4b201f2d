# SPDX-License-Identifier: Apache-2.0
"""Who has which mover, and why its bytes move as they do: for the admin face alone. Thread: the loop's."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from kvpool.model.identity import ClientKind
from kvpool.server.calls import Client

__all__ = ["MoverNumbers", "MoverRow", "mover_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverNumbers:
    """One registered ring and its mover."""

    client_id: bytes
    pid: int | None
    """Of the mover, in the server's namespace; None if there is no process (yet, or any more)."""

    gpu: str
    """UUID of the ring's device."""

    state: str
    """starting, ready, ending or over."""

    joined: bool
    """True while the client's chunks go through it."""

    slots: int
    """Of each direction."""

    slot_bytes: int
    stored_bytes: int
    """Moved under grants that ended, as ``loaded_bytes``."""

    loaded_bytes: int
    age_s: float
    """Since the ring was registered."""

    reason: str
    """Why it ends or ended; empty while it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverRow:
    """One worker, and its mover if it has one; or a mover whose client is gone."""

    client_id: str
    label: str
    mode: str
    """As agreed at its registration; empty before."""

    mode_reason: str
    pid: int | None = None
    gpu: str = ""
    state: str = ""
    joined: bool = False
    slots: int = 0
    slot_bytes: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    age_s: float = 0.0
    reason: str = ""


def mover_table(clients: Iterable[Client], movers: Iterable[MoverNumbers]) -> list[MoverRow]:
    """Return a row for each worker and each mover, workers first."""
    workers = {c.client_id: c for c in clients if c.kind is ClientKind.WORKER}
    moved = list(movers)
    without = [c for c in workers.values() if c.client_id not in {m.client_id for m in moved}]
    rows = [_row(m.client_id, workers.get(m.client_id), m) for m in moved]
    return rows + [_row(c.client_id, c, None) for c in without]


def _row(client_id: bytes, client: Client | None, mover: MoverNumbers | None) -> MoverRow:
    row = MoverRow(client_id=client_id.hex(), label="", mode="", mode_reason="the client is gone")
    if client is not None:
        mode = client.mode.value if client.mode else ""
        row = replace(row, label=client.label, mode=mode, mode_reason=client.mode_reason)
    if mover is not None:
        shown = asdict(mover)
        del shown["client_id"]
        row = replace(row, **shown)
    return row
