# SPDX-License-Identifier: Apache-2.0
"""Which servers hold which shards of an engine, and the scheduler's attachments to them as one.

The map comes from where the workers really are, as they told in the handshake, never from dividing numbers of ranks.
"""

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from kvpool.client.locate import Clues, at
from kvpool.client.state import LinkState
from kvpool.connector.attach import Attachment, Session
from kvpool.connector.plan import WorkerFacts
from kvpool.model.reasons import UncachedReason

__all__ = ["NotPlaced", "Placement", "Servers", "clues_of", "join", "placements"]

log = logging.getLogger("kvpool.connector")

_LOCAL: Final = ("ipc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:")


class NotPlaced(Exception):
    """The scheduler cannot ask for all shards; the text says which ranks' servers are why."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One server and what its ranks of one pipeline stage hold."""

    server: str
    shards: tuple[int, ...]
    stage: int
    facts: WorkerFacts
    """Of one of these ranks."""

    label: str
    """The server's address, and the stage where there are several."""

    told: str = ""
    """Address of it that its workers told, if it is on another node and that address might lead there."""


def placements(
    workers: Sequence[WorkerFacts], node: str, all_servers: str = "", *, listed: bool = False
) -> tuple[Placement, ...]:
    """Return the servers of *workers* with what is held there, for a scheduler that runs on *node*.

    What a worker calls its server may lead each node to its own one. So those of other nodes are found by their nodes,
    which are the servers' ids, where there is something to find them by.

    Ranks that hold the same shard may use several servers: each then keeps the shard, and a hit is one at all of them.

    Args:
        workers: what the workers told.
        node: of the scheduler.
        all_servers: an address whose name lists all servers; empty if there is none.
        listed: there is a list of servers to look into.

    Raises:
        NotPlaced: a server cannot be reached from here, or the ranks at one server do not fit each other.
    """
    homes: dict[tuple[str, int], list[WorkerFacts]] = {}
    for facts in workers:
        far = facts.node != node and (all_servers or listed)
        server = at(all_servers, facts.node) if far else facts.server
        if facts.node != node and server.startswith(_LOCAL):
            raise NotPlaced(
                f"shard {facts.shard} is at {facts.server} of another machine, which cannot be reached from this "
                "machine; give its worker an address tcp://host:port"
            )
        homes.setdefault((server, facts.stage), []).append(facts)
    for (server, _), ranks in homes.items():
        _check_readers(server, ranks)
    return tuple(
        Placement(
            server,
            tuple(sorted({facts.shard for facts in ranks})),
            stage,
            ranks[0],
            f"{server} stage {stage}" if ranks[0].stages > 1 else server,
            "" if server == ranks[0].server or ranks[0].server.startswith(_LOCAL) else ranks[0].server,
        )
        for (server, stage), ranks in homes.items()
    )


def _check_readers(server: str, ranks: Sequence[WorkerFacts]) -> None:
    """Each shard at a server has one writer, and as many readers as its ranks counted."""
    readers = Counter(facts.shard for facts in ranks)
    writers = Counter(facts.shard for facts in ranks if facts.writer)
    for facts in ranks:
        if writers[facts.shard] != 1 or readers[facts.shard] != facts.readers:
            raise NotPlaced(
                f"{readers[facts.shard]} ranks at {server} share shard {facts.shard}, {writers[facts.shard]} of them "
                f"store it, and {facts.readers} were expected there: all ranks of a node must use one server"
            )
    if len({facts.readers for facts in ranks}) > 1:
        raise NotPlaced(
            f"the shards at {server} are shared by {sorted({facts.readers for facts in ranks})} ranks, and one number "
            "for all is supported: give each node whole groups of the ranks that hold the same"
        )


def clues_of(place: Placement, home: str) -> Clues:
    """How the server of *place* may be found from the node whose own server is at *home*."""
    return Clues(place.told, home if place.server != home else "")


def join(attachments: Mapping[str, Attachment]) -> "Attachment | Servers":
    """Return the only attachment itself, or several as one."""
    return next(iter(attachments.values())) if len(attachments) == 1 else Servers(attachments)


class Servers:
    """Several attachments with the face of one. The scheduler's thread calls it."""

    def __init__(self, attachments: Mapping[str, Attachment]) -> None:
        self._attachments = dict(attachments)
        self._epochs: tuple[int | None, ...] = ()
        self._epoch = 0
        self._told = False

    def wait_verdict(self, timeout_s: float) -> None:
        """Wait until it is known of each server whether it is there; all together at most *timeout_s*."""
        ends_s = monotonic() + timeout_s
        for attachment in self._attachments.values():
            attachment.wait_verdict(max(0.0, ends_s - monotonic()))

    def session(self) -> Session | None:
        """Return the session that work can be begun in now; None if no server can be used, or if they disagree.

        While some servers are away their lookups are misses, but what the others' ranks compute is still stored. Each
        change at any server makes another epoch, so that answers given before it are asked for again.
        """
        sessions = [attachment.session() for attachment in self._attachments.values()]
        epochs = tuple(None if session is None else session.epoch for session in sessions)
        if epochs != self._epochs:
            self._epochs, self._epoch = epochs, self._epoch + 1
            self._warn_of_doubles()
        usable = [session for session in sessions if session is not None]
        if len({session.chunk_tokens for session in usable}) != 1:
            return None
        lease_s = min(session.lookup_lease_s for session in usable)
        return Session(self._epoch, usable[0].chunk_tokens, lease_s)

    def uncached(self) -> UncachedReason | None:
        """Return why nothing can be loaded; None if it can."""
        reasons = [attachment.uncached() for attachment in self._attachments.values()]
        if (reason := next(filter(None, reasons), None)) is not None:
            return reason
        return UncachedReason.CHUNK_TOKENS if self.session() is None else None

    def states(self) -> dict[str, LinkState]:
        """Return how each server stands, by its address (and stage, where there are several)."""
        return {label: attachment.link.state for label, attachment in self._attachments.items()}

    def down(self) -> int:
        """Return how many servers cannot be used now."""
        return len({a.link.config.server for a in self._attachments.values() if not a.link.state.healthy})

    def close(self, timeout_s: float) -> None:
        """Say goodbye to all servers at once; waits at most about *timeout_s*. Idempotent."""
        closing = [
            threading.Thread(target=attachment.close, args=(timeout_s,), name="kvpool-close", daemon=True)
            for attachment in self._attachments.values()
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _warn_of_doubles(self) -> None:
        """Say once if two addresses are one server: it answers no lookup id twice, so nothing would ever hit."""
        links = [attachment.link for attachment in self._attachments.values() if attachment.link.state.healthy]
        servers = {link.config.server for link in links}
        if not self._told and len({link.state.boot_id for link in links}) < len(servers):
            self._told = True
            log.warning(
                "kvpool: some of %s are the same server, nothing will hit: give all its ranks one address",
                ", ".join(sorted(servers)),
            )
