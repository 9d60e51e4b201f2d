# SPDX-License-Identifier: Apache-2.0
"""One connection to a server for a command: says Hello as a probe, or tells in words why that failed."""

import socket
import threading
import time
from collections.abc import Sequence
from typing import Final, Self, TypeVar
from urllib.parse import urlsplit

from kvpool.cli.errors import Failure
from kvpool.client.call import Frame
from kvpool.client.link import Link
from kvpool.client.state import LinkState
from kvpool.config import ClientConfig
from kvpool.model.errors import CacheError
from kvpool.model.identity import ClientKind
from kvpool.model.reasons import UncachedReason
from kvpool.wire.messages import Ping, Register, Reply, Request, Statistics, Stats, Welcome

__all__ = ["Probe", "Session", "descriptor_problem", "listening_problem"]

R = TypeVar("R", bound=Reply)

CLOSE_S: Final = 1.0
FINAL: Final = frozenset(
    {UncachedReason.VERSION, UncachedReason.IDENTITY, UncachedReason.LAYOUT, UncachedReason.CHUNK_TOKENS}
)
"""States that waiting does not change."""

REMEDIES: Final = {
    UncachedReason.VERSION: "upgrade the older side",
    UncachedReason.IDENTITY: "give the server's secret with --secret-file, or a token with --token-file",
    UncachedReason.LAYOUT: "the server cannot keep this layout; use smaller chunks or a larger L1",
    UncachedReason.DRAINING: "it is shutting down; wait for its successor",
}


class Session:
    """A Link that is up. A context manager; everything it opened is closed at its end."""

    def __init__(self, config: ClientConfig, kind: ClientKind, registration: Register | None = None) -> None:
        """Connect nothing yet; a worker or scheduler brings its *registration*."""
        self._config = config
        self._changed = threading.Event()
        self.link = Link(config, kind, on_state=self._note)
        if registration is not None:
            self.link.registration = registration

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            Failure: the server cannot be reached or refuses; the text says why and what to do.
        """
        if problem := listening_problem(self._config.server):
            self.link.close(CLOSE_S)
            raise Failure(f"--server {self._config.server}: {problem}")
        self.link.start()
        try:
            self._wait_until_up()
        except BaseException:
            self.link.close(CLOSE_S)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Say goodbye."""
        self.link.close(CLOSE_S)

    @property
    def state(self) -> LinkState:
        """How the link stands now."""
        return self.link.state

    @property
    def welcome(self) -> Welcome:
        """The server's answer to Hello."""
        welcome = self.link.state.welcome
        assert welcome is not None
        return welcome

    def call(self, request: Request[R], frames: Sequence[Frame] = ()) -> tuple[R, Sequence[Frame]]:
        """Ask and wait for the answer.

        Raises:
            Failure: the server refused or did not answer in time.
        """
        try:
            return self.link.call(request, frames)
        except CacheError as e:
            raise Failure(f"--server {self._config.server}: {e.code}: {e}") from e

    def _note(self, _: LinkState) -> None:
        self._changed.set()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + self._config.connect_s
        while True:
            self._changed.clear()
            state = self.link.state
            if state.healthy:
                return
            left = deadline - time.monotonic()
            if state.reason in FINAL or left <= 0:
                raise Failure(self._why(state))
            self._changed.wait(left)

    def _why(self, state: LinkState) -> str:
        reason = state.reason or UncachedReason.UNREACHABLE
        what = state.detail or f"no answer to Hello within {self._config.connect_s:g} s"
        remedy = REMEDIES.get(reason, "see whether it is a kvpool server, and read its log")
        return f"--server {self._config.server}: {what}; {remedy}"


class Probe(Session):
    """A session that only looks."""

    def __init__(self, config: ClientConfig) -> None:
        """Prepare a probe of the server that *config* names."""
        super().__init__(config, ClientKind.PROBE)

    def statistics(self) -> Statistics:
        """Return the server's numbers.

        Raises:
            Failure: no answer, or a refusal.
        """
        return self.call(Stats())[0]

    def round_trip_s(self, times: int = 20) -> float:
        """Return the median time of *times* pings.

        Raises:
            Failure: no answer, or a refusal.
        """
        samples = []
        for _ in range(times):
            start = time.perf_counter()
            self.call(Ping())
            samples.append(time.perf_counter() - start)
        return sorted(samples)[times // 2]


def listening_problem(address: str, timeout_s: float = 2.0) -> str:
    """Say why nothing can connect to *address*, with the remedy; empty if something listens there."""
    path = address.removeprefix("ipc://")
    try:
        if address.startswith("tcp://"):
            parts = urlsplit(address)
            socket.create_connection((parts.hostname or "", parts.port or 0), timeout_s).close()
        else:
            _touch(path, timeout_s)
    except PermissionError:
        return "permission denied; run as the server's user or in its group, or widen listen.socket_mode"
    except FileNotFoundError:
        return "no such socket; start a server with `kvpool server`, or name the right address"
    except ConnectionRefusedError:
        return "nobody listens there; start a server with `kvpool server`, or name the right address"
    except OSError as e:
        return f"{e.strerror or e}; check the address, and that its network can be reached from here"
    except ValueError as e:  # no port, no name
        return f"{e}; check the address"
    return ""


def descriptor_problem(path: str) -> str:
    """Say why segments cannot be had at the descriptor socket *path*; empty if they can, or if there is none."""
    if not path:
        return ""
    try:
        _touch(path, 1.0)
    except OSError as e:
        return f"{path}: {e.strerror or e}"
    return ""


def _touch(path: str, timeout_s: float) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout_s)
        probe.connect(path)
