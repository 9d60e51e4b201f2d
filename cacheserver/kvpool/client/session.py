# SPDX-License-Identifier: Apache-2.0
"""One session with one run of a server: the handshake, then calls and heartbeats until something ends it.

    Hello -> AttachBulk (workers) -> descriptor socket -> ... Register -> heartbeats, Renew

Used by the Link's thread alone. A session never heals: it ends with SessionOverError, and the Link begins a fresh one.
"""

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, TypeVar

import msgspec

from kvpool._version import __version__
from kvpool.client.call import Call
from kvpool.client.credential import read_credential, read_server_key
from kvpool.client.descriptors import Descriptors
from kvpool.client.pipe import Pipe
from kvpool.client.socket import HANDSHAKE_SHARE, Door
from kvpool.config import ClientConfig
from kvpool.model import keys
from kvpool.model.errors import (
    CacheError,
    DeadlineExceeded,
    Draining,
    IdentityExpired,
    NotRegistered,
    ServerUnavailable,
    StaleBoot,
)
from kvpool.model.identity import ClientKind, Mode, Role
from kvpool.wire.descriptors import SUFFIX
from kvpool.wire.messages import (
    AttachBulk,
    Hello,
    Locate,
    Ping,
    Pong,
    Register,
    Registered,
    Renew,
    Renewed,
    Reply,
    Request,
    Unregister,
    Welcome,
)
from kvpool.wire.versions import VERSION_MAX, VERSION_MIN

__all__ = ["Session", "SessionOverError", "greeting"]

R = TypeVar("R", bound=Reply)

log = logging.getLogger("kvpool.client")

_HANDSHAKE_WINDOW: Final = 4
_RENEW_SHARE: Final = 0.8
_RENEW_PAUSE_S: Final = 1.0


class SessionOverError(Exception):
    """The session ended; *error* is what its outstanding calls end with."""

    def __init__(self, error: CacheError) -> None:
        super().__init__(str(error))
        self.error = error


def greeting(config: ClientConfig, kind: ClientKind, client_id: bytes, role: Role) -> Hello:
    """Return the Hello of a client.

    Raises:
        IdentityRefused: the credential cannot be read.
    """
    return Hello(
        version_min=VERSION_MIN,
        version_max=VERSION_MAX,
        kind=kind,
        client_id=client_id,
        self_test=keys.self_test(),
        role=role,
        client_version=__version__,
        label=config.label,
        credential=read_credential(config),
    )


class Session:
    """See the module. The constructor opens the control connection and says nothing yet.

    Raises:
        ServerUnavailable: the server's key is not known yet.
    """

    def __init__(self, door: Door, config: ClientConfig, kind: ClientKind, client_id: bytes, role: Role) -> None:
        self._door = door
        self._config = config
        self.kind = kind
        self._client_id = client_id
        self._role = role
        self._server_key = read_server_key(config)
        self._control = self._pipe(_HANDSHAKE_WINDOW)
        self._bulk: Pipe | None = None
        self.descriptors: Descriptors | None = None
        self.welcome: Welcome | None = None
        self.registered: Register | None = None
        self.draining = False
        self._handshake_s = HANDSHAKE_SHARE * config.connect_s
        self._given_up: Callable[[], bool] = lambda: False
        self._silent_s = config.request_s
        self._heard_s = monotonic()
        self._beat_s: float | None = None
        self._ping: Call[Pong] | None = None
        self._pinged_s = 0.0
        self._renew_s: float | None = None
        self._renewal: Call[Renewed] | None = None

    @property
    def boot_id(self) -> bytes:
        """Boot id of the server that answered; empty before."""
        return self._control.boot_id

    # --- handshake -------------------------------------------------------------------------------------------------

    def hello(self, given_up: Callable[[], bool] = lambda: False) -> Welcome:
        """Say Hello and bind the other connections; ends early once *given_up* after a wake-up of the Door.

        Raises:
            CacheError: refused, or no answer in time.
        """
        self._given_up = given_up
        ends_s = monotonic() + self._handshake_s
        welcome = self._exchange(greeting(self._config, self.kind, self._client_id, self._role), ends_s)
        self.welcome = welcome
        self._silent_s = max(2 * welcome.heartbeat_s, self._config.request_s)
        self._beat_s = monotonic() + welcome.heartbeat_s
        self._plan_renewal(welcome.identity_expires_s)
        limits = welcome.limits
        self._control.window = max(1, limits.in_flight - max(limits.bulk_window, limits.bulk_frames) - 1)
        if self.kind is ClientKind.WORKER:
            self._bulk = self._bulk_pipe(welcome)
            self._bulk.most, self._bulk.window_bytes = limits.bulk_frames, limits.bulk_window * limits.frame_bytes
            self._exchange(AttachBulk(ticket=welcome.ticket), ends_s, self._bulk)
        if welcome.descriptor_socket and self._config.server.startswith("ipc://"):
            # The server's own path may be another mount of the same folder: ours is beside the socket that we reached.
            self.descriptors = self._attach(self._config.server.removeprefix("ipc://") + SUFFIX, welcome.ticket)
        self._given_up = lambda: False
        return welcome

    def register(self, registration: Register) -> Registered:
        """Register.

        Raises:
            CacheError: refused, or no answer in time.
        """
        # Without descriptors there is nothing to map.
        modes = tuple(m for m in registration.modes if m is not Mode.CLIENT_MOVED or self.descriptors is not None)
        unable = {Mode.RING: registration.ring is None, Mode.MAPPED: registration.cache is None}
        modes = tuple(m for m in modes if not unable.get(m))
        if registration.modes and not modes:
            why = f": {registration.no_ring}" if registration.no_ring else ""
            raise ServerUnavailable(
                f"mode {' or '.join(registration.modes)} alone is allowed, and no descriptor socket can be reached, "
                f"or no mover can be used{why}"
            )
        request = msgspec.structs.replace(registration, modes=modes)
        reply = self._exchange(request, monotonic() + max(self._config.request_s, self._handshake_s))
        self.registered = registration
        return reply

    def locate(self, server_id: str) -> tuple[str, ...]:
        """Ask this server where another one of its pool is.

        Raises:
            CacheError: refused, no answer in time, or a server that does not know the question.
        """
        return self._exchange(Locate(server_id=server_id), monotonic() + self._config.request_s).addresses

    def unregister(self, ends_s: float) -> None:
        """Say that this client is over.

        Raises:
            CacheError: refused, or no answer by *ends_s*.
        """
        self._exchange(Unregister(), ends_s)

    # --- serving ---------------------------------------------------------------------------------------------------

    def submit(self, call: Call[Any], *, bulk: bool) -> None:
        """Queue a call; it ends by its deadline."""
        pipe = self._bulk if bulk else self._control
        if pipe is None:
            call.fail(ServerUnavailable("only a worker has a bulk connection"))
        else:
            pipe.add(call)

    def turn(self) -> None:
        """Send, wait until something comes or is due, receive, keep the heart beating.

        Raises:
            SessionOverError: the server is gone, silent, restarted, or does not know this client any more.
        """
        now_s = monotonic()
        pipes = self._pipes()
        for pipe in pipes:
            pipe.flush(now_s)
        self._door.wait(tuple(p.connection for p in pipes), self._pause_s(now_s))
        alarmed = any(p.connection.alarmed for p in pipes)
        for pipe in pipes:
            # Replies that stood in the queue count, also those that came while this process was stopped.
            if alarmed or pipe.connection.readable:
                self._receive(pipe)
        now_s = monotonic()
        for pipe in pipes:
            pipe.expire(now_s)
            if alarmed and (ended := pipe.connection.ended()):
                raise SessionOverError(ServerUnavailable(ended))
        self._renew(now_s)
        self._beat(now_s)

    def close(self, error: CacheError) -> None:
        """End all outstanding calls with *error* and drop the connections, but the descriptor socket; idempotent."""
        for pipe in self._pipes():
            pipe.close(error)

    def _attach(self, path: str, ticket: bytes) -> Descriptors | None:
        """Connect to the descriptor socket; bytes can be streamed without it."""
        try:
            return Descriptors(path, ticket, self.boot_id, self._config.connect_s)
        except ServerUnavailable as e:
            log.warning("no memory can be mapped, bytes will be streamed: %s", e)
            return None

    def _exchange(self, request: Request[R], ends_s: float, pipe: Pipe | None = None) -> R:
        call: Call[R] = Call(request, (), ends_s)
        (pipe or self._control).send_now(call, monotonic())
        while not call.done():
            if self._given_up():
                raise ServerUnavailable("the link is being closed")
            try:
                self.turn()
            except SessionOverError as e:
                raise e.error from e
        reply, _ = call.result()
        return reply

    def _receive(self, pipe: Pipe) -> None:
        try:
            for error in pipe.replies():
                self._heard_s = monotonic()
                self._judge(error)
        except StaleBoot as e:
            raise SessionOverError(e) from e

    def _judge(self, error: CacheError | None) -> None:
        """Look at a failure that says something about the session and not only about its own call."""
        if isinstance(error, IdentityExpired):
            self._renew_s = monotonic()
        elif isinstance(error, NotRegistered) and self.welcome is not None:
            raise SessionOverError(StaleBoot("the server does not know this client any more"))
        elif isinstance(error, Draining):
            self.draining = True

    def _beat(self, now_s: float) -> None:
        """Ping when it is time; a ping without any sign of life for too long ends the session."""
        if self._ping is not None and not self._ping.done():
            if now_s - max(self._pinged_s, self._heard_s) > self._silent_s:
                raise SessionOverError(ServerUnavailable(f"the server did not answer for {self._silent_s:.1f} s"))
            return
        if self._ping is not None:
            self.draining |= self._ping.error() is None and self._ping.result()[0].draining
            self._ping = None
        if self._beat_s is not None and now_s >= self._beat_s and self.welcome is not None:
            self._beat_s, self._pinged_s = now_s + self.welcome.heartbeat_s, now_s
            self._ping = Call(Ping(), (), now_s + 2 * self._silent_s)
            self._control.send_now(self._ping, now_s)

    def _renew(self, now_s: float) -> None:
        """Send the credential again before it runs out."""
        if self._renewal is not None and self._renewal.done():
            renewal, self._renewal = self._renewal, None
            if (error := renewal.error()) is None:
                self._plan_renewal(renewal.result()[0].identity_expires_s)
            elif not isinstance(error, DeadlineExceeded):
                raise SessionOverError(error)
        if self._renewal is None and self._renew_s is not None and now_s >= self._renew_s:
            self._renew_s = now_s + _RENEW_PAUSE_S
            try:
                credential = read_credential(self._config)
            except CacheError as e:
                raise SessionOverError(e) from e
            self._renewal = Call(Renew(credential=credential), (), now_s + self._config.request_s)
            self._control.send_now(self._renewal, now_s)

    def _plan_renewal(self, expires_s: float | None) -> None:
        self._renew_s = None if expires_s is None else monotonic() + max(_RENEW_PAUSE_S, _RENEW_SHARE * expires_s)

    def _pause_s(self, now_s: float) -> float:
        """How long nothing has to be done if nothing comes."""
        times = [t for p in self._pipes() if (t := p.next_deadline_s()) is not None]
        if self._ping is not None and not self._ping.done():
            times.append(max(self._pinged_s, self._heard_s) + self._silent_s)
        elif self._beat_s is not None:
            times.append(self._beat_s)
        if self._renewal is None and self._renew_s is not None:
            times.append(self._renew_s)
        return max(0.0, min(times, default=now_s + self._silent_s) - now_s)

    def _pipes(self) -> tuple[Pipe, ...]:
        return (self._control,) if self._bulk is None else (self._control, self._bulk)

    def _bulk_pipe(self, welcome: Welcome) -> Pipe:
        """Open the bulk connection: unencrypted where the pool wants that, else the way the control one went."""
        config, window = self._config, welcome.limits.bulk_window
        if not welcome.plain_bulk_port:
            return self._pipe(window)
        address = f"{config.server.rpartition(':')[0]}:{welcome.plain_bulk_port}"
        return Pipe(self._door.connect(address, "", config.connect_s), window, config.transfer_s)

    def _pipe(self, window: int) -> Pipe:
        config = self._config
        return Pipe(self._door.connect(config.server, self._server_key, config.connect_s), window, config.transfer_s)
