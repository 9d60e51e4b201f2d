# SPDX-License-Identifier: Apache-2.0
"""Keeps a client's ring joined to its mover, session after session; in mode mapped, its exported cache.

    registered with a ring -> WatchRing -> ready: join -> WatchRing(joined) -> ... -> over: register again
                                                 retired by us -> WatchRing(retired) -> over

Until the ring is joined, and after it was retired, bytes are streamed. A mover that never got ready means that the ring
cannot be used here (the device is not visible to the server, its handle is refused): then this client registers without
it, with the reason, and tries again after a while.
"""

import logging
import os
import threading
from time import monotonic
from typing import Final

import msgspec

from kvpool.client.call import Call
from kvpool.client.link import Link
from kvpool.client.ring_ports import JoinedRing, RingPort
from kvpool.client.state import LinkState
from kvpool.client.supervise import attempt
from kvpool.model.errors import Busy, DeadlineExceeded, ServerUnavailable
from kvpool.model.identity import Mode
from kvpool.wire.basics import REASON_CHARS
from kvpool.wire.messages import Register, RingNews, RingState, WatchRing

__all__ = ["RingKeeper"]

log = logging.getLogger("kvpool.client")

_WATCH_S: Final = 20.0
_PAUSE_S: Final = 0.2
_AGAIN_FIRST_S: Final = 30.0
_AGAIN_LONGEST_S: Final = 600.0


class RingKeeper:
    """See the module. One thread of its own; ``equip`` and ``on_state`` are the link's, ``current`` is for any."""

    def __init__(self, port: RingPort) -> None:
        self._port = port
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._base: Register | None = None
        self._ring: JoinedRing | None = None
        self._served = 0
        self._refused = ""
        self._again_s = _AGAIN_FIRST_S
        self._again_at_s: float | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvpool-ring", daemon=True)
        self.reason = "no mover is joined yet"
        """Why chunks do not go through the ring, for people; empty while they do."""

    def begin(self, link: Link) -> None:
        """Keep the ring of *link*, whose states ``on_state`` is told; once."""
        self._link = link
        self._thread.start()

    def equip(self, base: Register) -> Register:
        """Return a registration with the ring, or without it while it cannot be used."""
        self._base = base
        mode = self._port.mode
        without = tuple(m for m in base.modes if m is not mode)
        if mode not in base.modes:
            self.reason = f"mode {mode} is not among those offered"
            return base
        if self._refused and (without or mode is Mode.MAPPED):
            # A client whose only way is mapped offers it without a cache: then it is refused, and runs uncached.
            return msgspec.structs.replace(base, modes=without or base.modes, no_ring=self._refused[:REASON_CHARS])
        return msgspec.structs.replace(self._port.offer(base), process_id=os.getpid())

    def on_state(self, _state: LinkState) -> None:
        """Look at the link's state."""
        with self._changed:
            self._changed.notify_all()

    def current(self) -> JoinedRing | None:
        """Return the ring if it is joined and works."""
        ring = self._ring
        return None if ring is None or ring.retired else ring

    def close(self, timeout_s: float) -> None:
        """Let go of the ring and end the thread; waits at most *timeout_s*. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (epoch := self._next_session()) is not None:
            attempt("the ring's keeper", lambda: self._serve(epoch))

    def _next_session(self) -> int | None:
        """Wait for a session that was agreed to use the ring, or for the time to try again; None at the end."""
        assert self._link is not None
        with self._changed:
            while not self._closing:
                state = self._link.state
                if state.healthy and state.mode is self._port.mode and state.epoch != self._served:
                    self._served = state.epoch
                    return state.epoch
                left_s = None if self._again_at_s is None else self._again_at_s - monotonic()
                if left_s is not None and left_s <= 0:
                    self._refused, self._again_at_s = "", None
                    self._register_again()
                else:
                    self._changed.wait(left_s)
            return None

    def _serve(self, epoch: int) -> None:
        """Follow one session's ring to its end."""
        ring: JoinedRing | None = None
        failure = ""
        try:
            while (news := self._watch(epoch, ring, failure)) is not None:
                if news.state is RingState.OVER:
                    self._over(news.reason, joined=ring is not None)
                    return
                if news.state is RingState.READY and ring is None and not failure:
                    ring, failure = self._join(news)
        finally:
            self._ring = None
            if ring is not None:
                ring.close()

    def _join(self, news: RingNews) -> tuple[JoinedRing | None, str]:
        assert self._link is not None
        address = _resolved(news.address, self._link.config.server)
        try:
            ring = self._port.join(address, news.secret, monotonic() + self._link.config.connect_s, self._wake)
        except ServerUnavailable as e:
            return None, str(e)
        self._ring, self._again_s = ring, _AGAIN_FIRST_S
        return ring, ""

    def _watch(self, epoch: int, ring: JoinedRing | None, failure: str) -> RingNews | None:
        """Return the server's next news; None if the session or this keeper is over."""
        while not self._is_over(epoch):
            call = self._ask(epoch, ring, failure)
            if self._is_over(epoch) or not call.done():
                continue  # the ring was retired meanwhile: that is to be told
            error = call.error()
            if error is None:
                return call.result()[0]
            if not isinstance(error, Busy | DeadlineExceeded):
                self.reason = str(error)
                return None
            with self._changed:
                self._changed.wait_for(lambda: self._closing, _PAUSE_S)
        return None

    def _ask(self, epoch: int, ring: JoinedRing | None, failure: str) -> Call[RingNews]:
        """Tell the server how the ring stands, and wait until it answers or that is not true any more."""
        assert self._link is not None
        told = failure or (ring.retired if ring is not None else "")
        if told:
            self.reason = told
        request = WatchRing(joined=ring is not None and not told, retired=told[:REASON_CHARS], wait_s=_WATCH_S)
        within_s = _WATCH_S + self._link.config.request_s
        call: Call[RingNews] = self._link.submit(request, deadline_s=within_s, epoch=epoch)
        call.then(self._wake)
        if request.joined and self.reason:
            # What is submitted from now on reaches the server after this.
            self.reason = ""
            log.info("kvpool: a mover was joined, chunks go by mode %s", self._port.mode)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(epoch) or call.done() or self._left(ring, told))
        return call

    @staticmethod
    def _left(ring: JoinedRing | None, told: str) -> bool:
        """True if the ring was retired since the server was told how it stands."""
        return ring is not None and bool(ring.retired) and not told

    def _is_over(self, epoch: int) -> bool:
        assert self._link is not None
        state = self._link.state
        # A server that drains still serves the session.
        return self._closing or state.epoch != epoch or state.mode is not self._port.mode

    def _over(self, reason: str, *, joined: bool) -> None:
        """The mover is gone: register again, with a new generation, or without the ring if it never worked."""
        self.reason = reason or "its mover ended"
        log.warning("kvpool: the mover ended: %s", self.reason)
        if not joined:
            self._refused = self.reason if self._port.mode is Mode.RING else f"not mapped: {self.reason}"
            self._again_at_s = monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, _AGAIN_LONGEST_S)
        self._register_again()

    def _register_again(self) -> None:
        assert self._link is not None
        if self._base is not None and not self._closing:
            self._link.registration = self.equip(self._base)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _resolved(address: str, server: str) -> str:
    """Return a mover's address as this process reaches it: beside the server's own."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        folder = server.removeprefix("ipc://").rpartition("/")[0]
        return f"unix:{folder}/{where}"
    host = server.removeprefix("tcp://").rpartition(":")[0]
    return f"tcp:{host}:{where}"
