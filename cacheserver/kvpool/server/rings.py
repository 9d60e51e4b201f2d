# SPDX-License-Identifier: Apache-2.0
"""The rings of GPU clients: the mover behind each, what it was granted, who waits for news of it. Thread: the loop's.

    Register -> (former mover reaped) -> starting -> ready -> client joined: its stores and loads are granted
             -> ended: by the client's end, its word, a missed deadline or the mover's own death -> reaped: over

What was granted stays held until the mover said Revoked or is reaped. So a store is committed only then.
"""

import secrets
import select
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from kvpool.engine.claims import MoverClaims
from kvpool.metrics.numbers import Numbers
from kvpool.model.errors import Busy
from kvpool.server.answers import Answers
from kvpool.server.calls import Answer, Call
from kvpool.server.granted import NO_CHECKS, Granted, Lease, Over, Rows
from kvpool.server.mover_table import MoverNumbers
from kvpool.server.movers import Movers
from kvpool.transfer.cuda import uuid_text
from kvpool.transfer.mover.messages import Direction, Ring
from kvpool.wire.messages import CacheFacts, RingFacts, RingNews, RingState, WatchRing

__all__ = ["Rings"]

log = structlog.get_logger()

_MOVER_ID_BYTES: Final = 16
_REAP_POLL_S: Final = 0.02
_ALIVE: Final = (RingState.STARTING, RingState.READY)


@dataclass(slots=True, eq=False)
class _Ring:
    """One registered ring and its mover."""

    client_id: bytes
    mover_id: bytes
    facts: Ring
    process_id: int
    listen: str
    since_s: float
    state: RingState = RingState.STARTING
    started: bool = False
    joined: bool = False
    address: str = ""
    secret: bytes = b""
    reason: str = ""
    watch: tuple[Call, float] | None = None
    """Who waits for news, and until when."""

    def news(self) -> RingNews:
        """Return what there is to tell."""
        secret = self.secret if self.state is RingState.READY else b""
        return RingNews(state=self.state, address=self.address, secret=secret, reason=self.reason)

    def numbers(self, pid: int | None, stored_bytes: int, loaded_bytes: int, now_s: float) -> MoverNumbers:
        """Return it for people."""
        return MoverNumbers(
            client_id=self.client_id,
            pid=pid,
            gpu=uuid_text(self.facts.device),
            state=self.state.value,
            joined=self.joined,
            slots=self.facts.slots,
            slot_bytes=self.facts.slot_bytes,
            stored_bytes=stored_bytes,
            loaded_bytes=loaded_bytes,
            age_s=now_s - self.since_s,
            reason=self.reason,
        )

    def known(self, request: WatchRing) -> bool:
        """True if the client knows the state already."""
        match self.state:
            case RingState.OVER:
                return False
            case RingState.READY:
                return request.joined
            case _:
                return True


class Rings:
    """See the module.

    Args:
        movers: none yet.
        claims: the engine's verbs for movers.
        answers: sends news to those who wait.
        numbers: where deaths and bytes are counted.
        clock: monotonic seconds.
        checksums: share of stored chunks whose checksum the mover makes.
    """

    def __init__(
        self,
        movers: Movers,
        claims: MoverClaims,
        answers: Answers,
        numbers: Numbers,
        clock: Callable[[], float],
        checksums: float = 0.0,
    ) -> None:
        self._movers, self._claims, self._answers, self._numbers = movers, claims, answers, numbers
        self._clock = clock
        self._granted = Granted(movers, claims, numbers, checksums)
        self._sockets = _Sockets()
        self._rings: dict[bytes, _Ring] = {}
        """By client: the last one that it registered."""
        self._living: dict[bytes, _Ring] = {}
        """By mover: all whose process is not reaped."""
        self._waiting: list[_Ring] = []
        self._stirred, self._turned_s = False, 0.0
        self._former_gone = False
        self.watching = 0
        """Calls that wait for news."""

    # --- rings -----------------------------------------------------------------------------------------------------

    def register(self, client_id: bytes, facts: RingFacts | CacheFacts, process_id: int, listen: str) -> None:
        """Begin a client's ring in place of its former one; its mover is started once that one's is reaped.

        If the client exports its cache instead, the ring is to be the mover's own.
        """
        self.end(client_id, "the client registered again")
        ring = Ring(
            device=facts.device,
            handle=facts.handle if isinstance(facts, RingFacts) else b"",
            slot_bytes=facts.slot_bytes,
            slots=facts.slots,
            generation=facts.generation,
        )
        made = _Ring(client_id, secrets.token_bytes(_MOVER_ID_BYTES), ring, process_id, listen, self._clock())
        self._rings[client_id] = made
        self._waiting.append(made)
        self._stirred = True

    def end(self, client_id: bytes, reason: str) -> None:
        """End a client's ring, if it has one, without any news."""
        ring = self._rings.pop(client_id, None)
        if ring is not None:
            self._drop_watch(ring)
            self._stop(ring, reason)

    def watch(self, call: Call, request: WatchRing, now_s: float) -> Answer | None:
        """Take note of how a client stands with its ring; answered when there is news, or time is up."""
        ring = self._rings.get(call.owner.client_id)
        if ring is None:
            return Answer(RingNews(state=RingState.OVER, reason="no ring is registered"))
        self._tell(ring, now_s)
        if request.retired and ring.state in _ALIVE:
            self._stop(ring, f"the client: {request.retired}")
        if request.joined and not ring.joined and ring.state is RingState.READY:
            ring.joined = True
            self._claims.attach(ring.client_id, ring.mover_id)
        if not ring.known(request) or not request.wait_s:
            return Answer(ring.news())
        self._answers.hold(call)
        ring.watch = (call, now_s + request.wait_s)
        self.watching += 1
        return None

    def __len__(self) -> int:
        """Count the movers that exist."""
        return len(self._living)

    def numbers(self, now_s: float) -> list[MoverNumbers]:
        """Return each client's ring, and the movers that are left of former ones."""
        rings = {ring.mover_id: ring for ring in (*self._rings.values(), *self._living.values())}
        moved = self._granted.moved
        return [
            ring.numbers(self._movers.pid(mover), moved[mover, Direction.STORE], moved[mover, Direction.LOAD], now_s)
            for mover, ring in rings.items()
        ]

    # --- grants ----------------------------------------------------------------------------------------------------

    def grant_store(self, client_id: bytes, store_id: bytes, rows: Rows) -> bytes:
        """Let the mover fill the slots of a store; returns the grant, empty if the bytes go another way."""
        return self._grant(client_id, Direction.STORE, (client_id, store_id), rows, NO_CHECKS)

    def grant_load(self, client_id: bytes, load: Lease, rows: Rows, checks: Rows = NO_CHECKS) -> bytes:
        """Let the mover read the chunks of a load (lookup id, and which part of it) that lie in place.

        It verifies those with a checksum in *checks* (``CHECK``, one a chunk, or none at all).
        """
        return self._grant(client_id, Direction.LOAD, (client_id, *load), rows, checks)

    def revoke_store(self, client_id: bytes, store_id: bytes, over: Over, now_s: float) -> bool:
        """End a store's grant and call *over* once nothing runs under it; False if it has none."""
        revoked = self._granted.revoke((client_id, store_id), over, now_s)
        self._stirred |= revoked
        return revoked

    def revoke_load(self, client_id: bytes, load: Lease, now_s: float) -> None:
        """End a load's grant, if it has one; its slots stay held until nothing runs under it."""
        self._stirred |= self._granted.revoke((client_id, *load), None, now_s)

    def await_moved(self, client_id: bytes, what: Lease, over: Over) -> bool:
        """Call *over* once all of a store (its id) or a load was moved; see ``Granted.await_moved``."""
        return self._granted.await_moved((client_id, *what), over)

    def _grant(self, client_id: bytes, way: Direction, lease: Lease, rows: Rows, checks: Rows) -> bytes:
        ring = self._rings.get(client_id)
        if ring is None or not ring.joined or ring.state is not RingState.READY:
            return b""
        self._stirred = True
        try:
            return self._granted.grant(ring.mover_id, way, lease, rows, self._clock(), checks)
        except OSError as e:
            self._stop(ring, f"the arena cannot be handed out: {e}")
            raise Busy(ring.reason) from e

    # --- time ------------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when a mover has said something."""
        return self._sockets.epoll.fileno()

    def next_deadline_s(self, now_s: float) -> float | None:
        """Return when ``turn`` has something to do at the latest."""
        times = [due_s for ring in self._rings.values() if ring.watch is not None for due_s in (ring.watch[1],)]
        if (due_s := self._movers.next_deadline_s()) is not None:
            times.append(due_s)
        if self._stirred:
            times.append(now_s)
        elif self._waiting or len(self._movers) > len(self._sockets):
            times.append(self._turned_s + _REAP_POLL_S)
        return min(times, default=None)

    def due(self, ready: Collection[object], now_s: float) -> bool:
        """True if ``turn`` has something to do; *ready*: what is readable."""
        due_s = self.next_deadline_s(now_s)
        return self._sockets.epoll.fileno() in ready or (due_s is not None and now_s >= due_s)

    def turn(self, now_s: float) -> None:
        """Hear the movers, start and reap them, tell those who wait. Never waits."""
        self._stirred, self._turned_s = False, now_s
        if self._living:
            events = self._movers.turn(now_s)
            for mover_id, address, secret in events.ready:
                self._ready(self._living[mover_id], address, secret, now_s)
            for _, end in events.revoked:
                self._granted.ended(end.grant, end)
            self._note_ends(now_s)
            for mover_id, reason in events.reaped:
                self._reaped(self._living.pop(mover_id), reason, now_s)
            self._sockets.watch(self._movers.filenos())
        if self._waiting:
            self._start(now_s)
        for ring in self._rings.values():
            if ring.watch is not None and now_s >= ring.watch[1]:
                self._tell(ring, now_s)

    def keep_house(self, now_s: float) -> None:
        """End the grants of leases that ran out; see to it that movers have the memory that they need, and no other."""
        self._stirred |= self._granted.keep_house(now_s)
        self._share_memory()

    def _share_memory(self) -> None:
        """Let movers have all memory that may be granted, so that they register it before it is; take back the rest."""
        if not self._living:
            return
        mine = self._claims.memories()
        for memory in self._movers.memories() - mine:
            self._movers.forget(memory)
            self._stirred = True
        for ring in self._living.values():
            if ring.state is RingState.READY and self._movers.give(ring.mover_id, mine):
                self._stirred = True

    def close(self, timeout_s: float) -> None:
        """End all movers and wait until they are reaped, at most *timeout_s*. Idempotent."""
        if self._sockets.epoll.closed:
            return
        self._movers.end_all("the server ends")
        ends_s, pause = self._clock() + timeout_s, select.poll()
        while len(self._movers) and self._clock() < ends_s:
            self._movers.turn(self._clock())
            pause.poll(_REAP_POLL_S * 1000)
        self._sockets.epoll.close()

    def _start(self, now_s: float) -> None:
        self._waiting = [ring for ring in self._waiting if ring.state is RingState.STARTING]
        self._former_gone = self._former_gone or self._claims.former_gone()
        busy = {ring.client_id for ring in self._living.values()}
        for ring in [r for r in self._waiting if self._former_gone and r.client_id not in busy]:
            self._waiting.remove(ring)
            try:
                self._movers.start(ring.mover_id, ring.facts, ring.process_id, ring.listen, now_s)
            except OSError as e:
                ring.state, ring.reason = RingState.OVER, f"no mover can be started: {e}"
                self._tell(ring, now_s)
                continue
            ring.started = self._stirred = True  # its first message waits to be sent
            self._living[ring.mover_id] = ring
        self._sockets.watch(self._movers.filenos())

    def _ready(self, ring: _Ring, address: str, secret: bytes, now_s: float) -> None:
        if ring.state is RingState.STARTING:
            ring.state, ring.address, ring.secret = RingState.READY, _seen_by_client(address), secret
            self._share_memory()
            log.info("mover.ready", client=ring.client_id.hex(), mover=ring.mover_id.hex())
            self._tell(ring, now_s)

    def _note_ends(self, now_s: float) -> None:
        """Learn of movers that ended by themselves or missed a deadline."""
        current = self._movers.current()
        for ring in self._living.values():
            if ring.state in _ALIVE and ring.mover_id not in current:
                self._stop(ring, "")
                self._tell(ring, now_s)

    def _stop(self, ring: _Ring, reason: str) -> None:
        """End a ring's mover; the ring is over at once if there is none."""
        self._claims.detach(ring.client_id, ring.mover_id)
        ring.joined, ring.reason = False, ring.reason or reason
        if ring.state in _ALIVE:
            ring.state = RingState.ENDING if ring.started else RingState.OVER
            self._movers.end(ring.mover_id, reason)
            self._stirred = True

    def _reaped(self, ring: _Ring, reason: str, now_s: float) -> None:
        ring.state, ring.reason = RingState.OVER, ring.reason or reason
        self._granted.mover_reaped(ring.mover_id)
        _remove_socket(ring.listen)
        self._numbers.add("kvpool_movers_ended_total")
        log.info("mover.reaped", client=ring.client_id.hex(), mover=ring.mover_id.hex(), reason=ring.reason)
        self._tell(ring, now_s)

    def _tell(self, ring: _Ring, now_s: float) -> None:
        """Answer who waits for news of a ring."""
        if ring.watch is None:
            return
        call = ring.watch[0]
        self._drop_watch(ring)
        self._answers.finish(call, Answer(ring.news()), now_s)

    def _drop_watch(self, ring: _Ring) -> None:
        self.watching -= ring.watch is not None
        ring.watch = None


class _Sockets:
    """Those of the movers that live; readable when one of them is."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._polled: set[int] = set()

    def __len__(self) -> int:
        return len(self._polled)

    def watch(self, filenos: Collection[int]) -> None:
        """Watch these, and no others."""
        wanted = set(filenos)
        for fd in self._polled - wanted:
            with suppress(OSError):  # closed, and forgotten by that
                self.epoll.unregister(fd)
        for fd in wanted - self._polled:
            self.epoll.register(fd, select.EPOLLIN)
        self._polled = wanted


def _seen_by_client(address: str) -> str:
    """Cut a mover's address down to what is the same for its client: a file's name, or a port."""
    kind, _, where = address.partition(":")
    return f"{kind}:{where.rpartition('/' if kind == 'unix' else ':')[2]}"


def _remove_socket(listen: str) -> None:
    kind, _, path = listen.partition(":")
    if kind == "unix":
        Path(path).unlink(missing_ok=True)
