# SPDX-License-Identifier: Apache-2.0
"""Cache events: which chunks of a client's namespace came and went since it asked last.

A client that asks for the first time, or whose last question was too long ago, gets a snapshot first, in pages. What
changes meanwhile comes behind it: an entry may say again what the snapshot said, and none is missing.

A chunk has as many pieces as groups and shards. It is announced with the piece of the first group and of the first
shard that the client registered: the others are stored and evicted within the same moments as a rule, and a lookup
alone says what is whole.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvpool.engine.clients import Client
from kvpool.engine.core import Core
from kvpool.engine.outcomes import ChangeBatch
from kvpool.index.phases import READY
from kvpool.index.tables import KeyTable

__all__ = ["Changes"]

PAGE: Final = 1 << 15
"""Chunks of one answer: 1 MiB of digests."""

IDLE_S: Final = 120.0
"""Who has not asked for so long is not listening any more."""


@dataclass(slots=True)
class _Listener:
    table: KeyTable
    seen_s: float
    page: list[bytes] = field(default_factory=list)
    """What is left of its snapshot."""

    sequence: int = 0
    """Where the journal stood when the snapshot was made."""


class Changes:
    """The verb subscribe."""

    def __init__(self, core: Core) -> None:
        """Work on *core*."""
        self._core = core
        self._listeners: dict[bytes, _Listener] = {}

    def take(self, client_id: bytes, after: int, now_s: float) -> ChangeBatch:
        """Return what changed after the sequence number *after* of a former answer; 0 begins anew.

        Raises:
            NotRegistered: the client said no Hello, or did not register.
        """
        client = self._core.clients.get(client_id, now_s)
        known = self._listeners.get(client_id)
        listener = self._listen(client, now_s)
        if listener is not known:
            # Nobody noted what happened to its table before.
            return self._snapshot(listener)
        if listener.page and after == listener.sequence:
            return self._page(listener, begins=False)
        entries = self._core.index.journal.since(after) if after else None
        if entries is None:
            return self._snapshot(listener)
        page = entries[:PAGE]
        mine = [e for e in page if e.table == listener.table.number]
        return ChangeBatch(
            sequence=after + len(page),
            snapshot=False,
            more=len(page) < len(entries),
            stored=bytes(e.stored for e in mine),
            digests=b"".join(e.digest for e in mine),
        )

    def _listen(self, client: Client, now_s: float) -> _Listener:
        registration = client.registered()
        table = self._core.index.scopes.table(registration.scope, 0, min(registration.shards))
        listener = self._listeners.get(client.client_id)
        if listener is None or listener.table is not table:
            listener = self._listeners[client.client_id] = _Listener(table, now_s)
        listener.seen_s = now_s
        gone = [i for i, each in self._listeners.items() if now_s - each.seen_s > IDLE_S]
        for client_id in gone:
            del self._listeners[client_id]
        self._core.index.journal.watch({each.table.number for each in self._listeners.values()})
        return listener

    def _snapshot(self, listener: _Listener) -> ChangeBatch:
        slots = np.fromiter(listener.table.slots.values(), np.int64, len(listener.table.slots))
        ready = self._core.index.slots.phase[slots] == READY
        listener.page = [key for key, is_ready in zip(listener.table.slots, ready.tolist(), strict=True) if is_ready]
        # 0 means "anew": a journal that is still empty must not be answered with it.
        self._core.index.journal.sequence += not self._core.index.journal.sequence
        listener.sequence = self._core.index.journal.sequence
        return self._page(listener, begins=True)

    @staticmethod
    def _page(listener: _Listener, *, begins: bool) -> ChangeBatch:
        page, listener.page = listener.page[:PAGE], listener.page[PAGE:]
        return ChangeBatch(
            sequence=listener.sequence,
            snapshot=begins,
            more=bool(listener.page),
            stored=_ones(page),
            digests=b"".join(page),
        )


def _ones(items: Iterable[bytes]) -> bytes:
    return bytes(1 for _ in items)
