# SPDX-License-Identifier: Apache-2.0
"""The link's thread: runs one session after the other, with bounded back-off, until it is told to stop."""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Final

from kvpool.client.desk import Desk
from kvpool.client.gate import CopyGate
from kvpool.client.ports import PageLocks
from kvpool.client.segments import Segments
from kvpool.client.session import Session, SessionOverError
from kvpool.client.socket import Door
from kvpool.client.state import LinkState
from kvpool.client.supervise import attempt
from kvpool.model.errors import (
    CacheError,
    Draining,
    IdentityExpired,
    IdentityRefused,
    LayoutRefused,
    Malformed,
    SelfTestFailed,
    ServerUnavailable,
    StaleBoot,
    UnknownRequest,
    VersionMismatch,
)
from kvpool.model.identity import ClientKind, Mode
from kvpool.model.reasons import UncachedReason
from kvpool.wire.messages import Register, Welcome

__all__ = ["Keeper"]

log = logging.getLogger("kvpool.client")

_RETRY_FIRST_S: Final = 0.05
_RETRY_LONGEST_S: Final = 1.0
_RETRY_REFUSED_S: Final = 5.0
"""A refusal ends when somebody changes a server or a setting, not within milliseconds."""

_REASONS: Final[tuple[tuple[tuple[type[CacheError], ...], UncachedReason], ...]] = (
    ((VersionMismatch, SelfTestFailed, UnknownRequest, Malformed), UncachedReason.VERSION),
    ((IdentityRefused, IdentityExpired), UncachedReason.IDENTITY),
    ((LayoutRefused,), UncachedReason.LAYOUT),
    ((Draining,), UncachedReason.DRAINING),
)
_REFUSALS: Final = (UncachedReason.VERSION, UncachedReason.IDENTITY, UncachedReason.LAYOUT, UncachedReason.CHUNK_TOKENS)


class _NotAcceptedError(Exception):
    """The owner of the link cannot work with this server."""

    def __init__(self, reason: UncachedReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Keeper:
    """What the link's thread does.

    Others may set ``registration`` and ``locks``, and read ``segments`` (in the gate) and counts.
    """

    def __init__(
        self,
        door: Door,
        desk: Desk,
        gate: CopyGate,
        new_session: Callable[[], Session],
        accept: Callable[[Welcome], UncachedReason | None] | None,
    ) -> None:
        self._door = door
        self._desk = desk
        self._gate = gate
        self._new_session = new_session
        self._accept = accept
        self._stopping = False
        self._goodbye_s = 0.0
        self.registration: Register | None = None
        self.segments: Segments | None = None
        self.locks: PageLocks | None = None
        self.sessions = self.sessions_lost = self.faults = 0

    def stop(self, goodbye_s: float) -> None:
        """Ask the thread to say goodbye for at most *goodbye_s* and end; any thread, does not wait."""
        self._goodbye_s = goodbye_s
        self._stopping = True
        self._door.wake()

    def run(self) -> None:
        """Keep a session going until told to stop; an unexpected exception costs a session, never the thread."""
        while not self._stopping:
            if (error := attempt("the link to the cache server", self._keep_connected)) is not None:
                self.faults += 1
                self._uncached(UncachedReason.FAULT, str(error))
                self._pause(_RETRY_LONGEST_S)
        self.finish()

    def finish(self) -> None:
        """Close for good: by the thread at its end, or instead of it if it never ran."""
        self._uncached(UncachedReason.CLOSED, "the link was closed")
        self._door.close()

    def _keep_connected(self) -> None:
        retry_s = _RETRY_FIRST_S
        while not self._stopping:
            before = self.sessions
            reason = self._run_session()
            retry_s = _RETRY_FIRST_S if self.sessions > before else min(2 * retry_s, _RETRY_LONGEST_S)
            # Spread, so that all clients of a restarted server do not come at once.
            self._pause(_RETRY_REFUSED_S if reason in _REFUSALS else retry_s * random.uniform(0.5, 1.0))  # noqa: S311

    def _run_session(self) -> UncachedReason:
        """Run one session from Hello to its end; returns why it ended."""
        error: CacheError = ServerUnavailable("the client failed")
        reason = UncachedReason.FAULT
        try:
            session = self._new_session()
        except CacheError as e:
            self._uncached(_reason(e), str(e))
            return _reason(e)
        try:
            self._begin(session)
            while not self._stopping:
                self._serve(session)
            self._say_goodbye(session)
            error, reason = ServerUnavailable("the link was closed"), UncachedReason.CLOSED
        except SessionOverError as e:
            error, reason = e.error, _reason(e.error)
        except CacheError as e:
            error, reason = e, _reason(e)
        except _NotAcceptedError as e:
            error, reason = ServerUnavailable(f"this engine cannot use the server ({e.reason})"), e.reason
        finally:
            self._leave(session, reason, error)
        return reason

    def _begin(self, session: Session) -> None:
        welcome = session.hello(lambda: self._stopping)
        if self._accept is not None and (reason := self._accept(welcome)) is not None:
            raise _NotAcceptedError(reason)
        if session.descriptors is not None:
            self.segments = Segments(session.descriptors.fetch, self.locks)
        if session.kind is ClientKind.PROBE:
            self._healthy(session, None)
        elif self.registration is None:
            self._uncached(UncachedReason.STARTING, "no cache is registered yet", session)

    def _serve(self, session: Session) -> None:
        """One turn: registration if it is due, new calls, news from the server."""
        wanted = self.registration
        if session.kind is not ClientKind.PROBE and wanted is not None and wanted is not session.registered:
            if session.registered is not None:
                raise SessionOverError(StaleBoot("another registration replaces this session's"))
            self._healthy(session, session.register(wanted).mode)
        for call, bulk in self._desk.take():
            session.submit(call, bulk=bulk)
        session.turn()
        if session.draining and self._desk.state.healthy:
            draining = replace(
                self._desk.state, healthy=False, reason=UncachedReason.DRAINING, detail="it is shutting down"
            )
            self._desk.publish(draining, is_open=True)

    def _healthy(self, session: Session, mode: Mode | None) -> None:
        """Make a session known, unless the link is being closed: whoever closed it expects no news any more."""
        if self._stopping:
            return
        self.sessions += 1
        epoch = self._desk.state.epoch + 1
        # First the gate: nobody knows the epoch yet, and whoever learns it finds the gate open.
        self._gate.open(epoch)
        state = LinkState(
            healthy=True, reason=None, epoch=epoch, boot_id=session.boot_id, welcome=session.welcome, mode=mode
        )
        self._desk.publish(state, is_open=True)

    def _uncached(self, reason: UncachedReason, detail: str, session: Session | None = None) -> None:
        old = self._desk.state
        state = replace(old, healthy=False, reason=reason, detail=detail, mode=None)
        if session is not None:
            state = replace(state, boot_id=session.boot_id, welcome=session.welcome)
        self._desk.publish(state, is_open=False)

    def _leave(self, session: Session, reason: UncachedReason, error: CacheError) -> None:
        """End a session: first its calls, then its copies, then its mappings."""
        self._gate.shut()
        self.sessions_lost += self._desk.state.healthy and not self._stopping
        self._uncached(reason, str(error))
        session.close(error)
        for call, _ in self._desk.take():
            call.fail(error)
        while not self._gate.idle() and not self._stopping:
            self._door.wait((), _RETRY_LONGEST_S)
        if self.segments is not None:
            self.segments.drop()
            self.segments = None
        if session.descriptors is not None:
            session.descriptors.close()

    def _say_goodbye(self, session: Session) -> None:
        """Unregister, which says that nothing is mapped or written any more, and so only if that is true; bounded."""
        self._gate.shut()
        ends_s = monotonic() + self._goodbye_s
        while not self._gate.idle() and monotonic() < ends_s:
            self._door.wait((), ends_s - monotonic())
        if self._gate.idle() and session.registered is not None:
            if self.segments is not None:
                self.segments.drop()
            try:
                session.unregister(ends_s)
            except CacheError as e:
                log.warning("the cache server did not hear this client's goodbye: %s", e)

    def _pause(self, pause_s: float) -> None:
        ends_s = monotonic() + pause_s
        while not self._stopping and (left_s := ends_s - monotonic()) > 0:
            self._door.wait((), left_s)


def _reason(error: CacheError) -> UncachedReason:
    for classes, reason in _REASONS:
        if isinstance(error, classes):
            return reason
    return UncachedReason.UNREACHABLE
