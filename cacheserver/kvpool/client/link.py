# SPDX-License-Identifier: Apache-2.0
"""A client's link to its server: one thread that keeps a session going, and calls from any other thread.

    uncached (starting) -> Hello, Register -> healthy -> (lost, restarted) -> uncached -> running copies end -> Hello

A server that is down, slow, full or of another version makes the link uncached, with a reason; it never blocks or
fails the engine. Each state is logged once. The server frees all leases of a session that ended, so what could not be
sent in it (an EndRequest, a FreeLookup) never has to be sent later.
"""

import os
import threading
from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import TypeVar

from msgspec.structs import replace

from kvpool.client.call import Call, Frame
from kvpool.client.desk import Desk
from kvpool.client.gate import CopyGate
from kvpool.client.keeper import Keeper
from kvpool.client.locate import Clues, Locator, sources
from kvpool.client.names import Names
from kvpool.client.ports import PageLocks
from kvpool.client.rollcall import Answered, who_they_are
from kvpool.client.segments import Segments
from kvpool.client.session import Session, SessionOverError, greeting
from kvpool.client.socket import Door
from kvpool.client.state import LinkState
from kvpool.config import ClientConfig
from kvpool.model.errors import ServerUnavailable
from kvpool.model.identity import ClientKind, Role
from kvpool.model.reasons import UncachedReason
from kvpool.wire.messages import Hello, Register, Reply, Request, Welcome

__all__ = ["Link"]

R = TypeVar("R", bound=Reply)


class Link:
    """See the module. Any thread; only ``call``, ``close`` and the ``wait_`` methods wait."""

    def __init__(
        self,
        config: ClientConfig,
        kind: ClientKind,
        *,
        role: Role | None = None,
        clues: Clues | None = None,
        on_state: Callable[[LinkState], None] | None = None,
        accept: Callable[[Welcome], UncachedReason | None] | None = None,
    ) -> None:
        """Make a link that does nothing before ``start``.

        Args:
            config: where the server is, credentials, deadlines.
            kind: a worker or scheduler is healthy once registered, a probe after Hello.
            role: instead of the configured one.
            clues: how a server of another node may be found, if that is where the configured one is.
            on_state: told each new state, on the link's thread; must not block.
            accept: asked after each Welcome, on the link's thread; may set ``registration``. A reason that it returns
                keeps the link uncached.
        """
        self.config = config
        self.kind = kind
        self.role = role or config.role
        self._names = Names()
        looked_into = sources(config, clues or Clues(), self._look_up, self._ask_for)
        self._locator = Locator(config.server, self._identify, looked_into)
        self.client_id = os.urandom(16)
        """Random for each process's link, never a process id: those repeat over containers."""
        door = Door(self._names)
        self.gate = CopyGate(door.wake)
        """Every copy with a session's placements runs inside it."""
        self._door = door
        self._desk = Desk(config.server, door.wake, on_state)
        self._keeper = Keeper(door, self._desk, self.gate, self._new_session, accept)
        self._thread = threading.Thread(target=self._keeper.run, name="kvpool-link", daemon=True)
        self._closing = threading.Lock()
        self._closed = False

    @property
    def state(self) -> LinkState:
        """How the link stands now."""
        return self._desk.state

    @property
    def segments(self) -> Segments | None:
        """Mapped regions of the session, to be used inside the gate; None if the server hands out none."""
        return self._keeper.segments

    @property
    def locks(self) -> PageLocks | None:
        """Who locks the pages of mapped regions, for blocks that copy engines move. Set before ``start``."""
        return self._keeper.locks

    @locks.setter
    def locks(self, value: PageLocks | None) -> None:
        self._keeper.locks = value

    @property
    def registration(self) -> Register | None:
        """What this client caches; sent after every Hello once it is set. Another one begins a new session."""
        return self._keeper.registration

    @registration.setter
    def registration(self, value: Register) -> None:
        self._keeper.registration = value
        self._door.wake()

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def submit(
        self,
        request: Request[R],
        frames: Sequence[Frame] = (),
        *,
        deadline_s: float | None = None,
        bulk: bool = False,
        epoch: int | None = None,
    ) -> Call[R]:
        """Send a request; never blocks. The call ends by its deadline; at once if the link is uncached.

        Args:
            request: what to ask.
            frames: its raw frames; must not change before the call ended well.
            deadline_s: seconds from now; the configured request deadline if not given.
            bulk: over the bulk connection, at most as many at a time as the server gives credits.
            epoch: the session (``LinkState.epoch``) that the request's ids belong to; in any other one it fails with
                StaleBoot. Work begun in a session may go on while its server is draining.
        """
        within_s = self.config.request_s if deadline_s is None else deadline_s
        call: Call[R] = Call(request, frames, monotonic() + within_s)
        self._desk.submit(call, bulk=bulk, epoch=epoch)
        return call

    def call(
        self, request: Request[R], frames: Sequence[Frame] = (), *, deadline_s: float | None = None
    ) -> tuple[R, Sequence[Frame]]:
        """Send a request and wait for its answer.

        Raises:
            CacheError: refused, uncached, or no answer by the deadline.
        """
        return self.submit(request, frames, deadline_s=deadline_s).result()

    def wait_healthy(self, timeout_s: float) -> bool:
        """Wait until the link is healthy; returns whether it is."""
        return self._desk.wait_for(lambda state: state.healthy, timeout_s)

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        """Wait for the first Welcome; None if there was none in time."""
        self._desk.wait_for(lambda state: state.welcome is not None, timeout_s)
        return self.state.welcome

    def counters(self) -> dict[str, float]:
        """Return sessions begun and lost, and unexpected failures of the link's thread, since the start."""
        keeper = self._keeper
        return {
            "sessions": float(keeper.sessions),
            "sessions_lost": float(keeper.sessions_lost),
            "link_faults": float(keeper.faults),
        }

    def close(self, deadline_s: float = 2.0) -> None:
        """Say goodbye to the server for at most *deadline_s* and stop. Idempotent; waits for the thread.

        While the server does not answer a Hello that is under way, that takes up to ``connect_s`` more.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            if self._thread.ident is None:
                self._keeper.finish()
                return
            self._keeper.stop(deadline_s)
            self._thread.join(deadline_s + 2 * self.config.connect_s)

    def _new_session(self) -> Session:
        config = replace(self.config, server=self._locator.find())
        return Session(self._door, config, self.kind, self.client_id, self.role)

    def _look_up(self, host: str) -> tuple[str, ...]:
        return self._names.addresses(host, self.config.connect_s)

    def _identify(self, addresses: Sequence[str]) -> Generator[Answered, None, None]:
        """Ask the servers at *addresses* who they are; on the link's thread."""

        def hello() -> Hello:
            return greeting(self.config, ClientKind.PROBE, os.urandom(16), self.role)

        return who_they_are(self._door, self.config, hello, addresses, lambda: self._closed)

    def _ask_for(self, address: str, server_id: str) -> tuple[str, ...]:
        """Ask the server at *address* where another one is; on the link's thread."""
        session = Session(self._door, replace(self.config, server=address), ClientKind.PROBE, os.urandom(16), self.role)
        try:
            session.hello(lambda: self._closed)
            return session.locate(server_id)
        except SessionOverError as e:
            raise e.error from e
        finally:
            session.close(ServerUnavailable("one question was all"))
            if session.descriptors is not None:
                session.descriptors.close()
