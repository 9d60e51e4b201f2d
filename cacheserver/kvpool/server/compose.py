# SPDX-License-Identifier: Apache-2.0
"""The composition root: from a ServerConfig to a serving process and back to an exit code."""

import gc
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import structlog

from kvpool._version import __version__
from kvpool.arena.errors import ArenaError
from kvpool.arena.leftovers import Living
from kvpool.arena.opening import open_arena
from kvpool.config import ServerConfig
from kvpool.engine.engine import Engine
from kvpool.metrics.numbers import Numbers
from kvpool.model.errors import Draining
from kvpool.server.addresses import with_addresses
from kvpool.server.answers import Answers
from kvpool.server.bulk import BulkVerbs
from kvpool.server.caching import CachingVerbs
from kvpool.server.calls import Client
from kvpool.server.connections import Connections
from kvpool.server.descriptors import DescriptorServer, Grants, Segments
from kvpool.server.dispatch import Dispatcher
from kvpool.server.faces import open_faces
from kvpool.server.gpus import GpuSight, GpuWatch
from kvpool.server.identity import CredentialError, authenticator
from kvpool.server.inbox import Inbox
from kvpool.server.keys import KeyFileError, read_key
from kvpool.server.lanes import Lanes
from kvpool.server.live import LiveConfig, LiveState
from kvpool.server.logs import configure
from kvpool.server.loop import Loop
from kvpool.server.movers import Movers
from kvpool.server.neighbours import neighbours
from kvpool.server.parts import Parts
from kvpool.server.paths import ListenError
from kvpool.server.places import MoverPlaces, memory_of
from kvpool.server.publish import Facts, Publisher
from kvpool.server.rings import Rings
from kvpool.server.sessions import Rim, SessionVerbs
from kvpool.server.slices import ask_for_short_slices
from kvpool.server.snapshot import ServerSnapshot
from kvpool.server.sockets import Frontend
from kvpool.server.source import ConfigFile
from kvpool.transfer.mover.inventory import visible_gpus
from kvpool.transfer.mover.supervision import MOVER_COMMAND, MoverLimits
from kvpool.wire.descriptors import SUFFIX

__all__ = ["Clocks", "Server", "run_server"]

log = structlog.get_logger()

_BOOT_BYTES: Final = 16
_LANES_END_S: Final = 0.5
_MOVERS_END_S: Final = 5.0
"""A killed process in a driver's call may linger; it writes nothing that the next server would serve."""
_CANNOT_START: Final = (ArenaError, CredentialError, KeyFileError, ListenError)


@dataclass(frozen=True, slots=True)
class Clocks:
    """The two clocks; read nowhere else."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time  # noqa: TID251 - tokens name times of the wall clock
    """Seconds since 1970."""


class Server:
    """A server that listens; ``run`` serves.

    Args:
        config: what it should be.
        arena: what the descriptor socket hands out.
        engine: recovered by ``run``'s caller or not at all; see *recovered_chunks*.
        recovered_chunks: for people.
        clocks: real ones by default.
        mover_command: the movers' program.

    Raises:
        ListenError, CredentialError, KeyFileError: it cannot start; the text names the remedy.

    Thread: one thread makes, runs and closes it. ``request_stop`` and ``ask`` are for any other.
    """

    def __init__(
        self,
        config: ServerConfig,
        arena: Segments,
        engine: Engine,
        recovered_chunks: int = 0,
        clocks: Clocks | None = None,
        mover_command: Sequence[str] = MOVER_COMMAND,
    ) -> None:
        self._config = config = with_addresses(config)
        self._mover_command = mover_command
        self._clocks = clocks or Clocks()
        self.boot_id = secrets.token_bytes(_BOOT_BYTES)
        self.inbox = Inbox()
        with ExitStack() as resources:
            resources.callback(self.inbox.close)
            self._door = Frontend(config.limits)
            self._plain_bulk_port = 0
            resources.callback(self._door.close)
            self._listen()
            self._places = MoverPlaces(config.listen, config.mover)
            self._parts = self._make_parts(engine, arena)
            resources.callback(self._parts.rings.close, _MOVERS_END_S)
            self._door.watch(self._parts.rings.fileno())
            resources.callback(self._parts.lanes.close, _LANES_END_S)
            self._dispatcher = Dispatcher(self._parts.connections, config.limits, self._parts.numbers)
            self._descriptors = self._open_descriptors(arena)
            if self._descriptors is not None:
                resources.callback(self._descriptors.close)
            self._gpus = self._watch_gpus()
            if self._gpus is not None:
                resources.callback(self._gpus.close)
            self._publisher = self._make_publisher(recovered_chunks)
            self._loop = self._make_loop()
            self.snapshot = self._publisher.snapshot()
            self._faces = open_faces(self._config.http, self, self._clocks.monotonic)
            resources.callback(self._close_faces)
            # First of all, so that no face waits for a loop that has ended.
            resources.callback(self.inbox.shut)
            self._resources = resources.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Addresses that clients connect to."""
        return tuple(self._door.endpoints)

    @property
    def operations_address(self) -> str:
        """Host and port of the operations face; empty if there is none."""
        return self._faces.operations_address

    def run(self) -> None:
        """Serve until drained.

        Raises:
            Exception: a defect; the process must end.
        """
        self._parts.lanes.start()
        try:
            self._loop.run()
        except Exception:
            log.exception("loop.crashed")
            raise
        finally:
            self._parts.answers.fail_all(Draining("the server is shutting down"), self._clocks.monotonic())

    def request_stop(self) -> None:
        """Begin to drain. Any thread, also a signal handler."""
        self.inbox.post(self._loop.drain)

    def ask(self, question: Callable[[], Any], deadline_s: float) -> Any:
        """Run *question* on the loop and return its result; see ``Inbox.ask``."""
        return self.inbox.ask(question, deadline_s)

    @property
    def parts(self) -> Parts:
        """The server's parts; to be touched by questions on the loop alone."""
        return self._parts

    def follow(self, fd: int, live: LiveConfig) -> None:
        """Let *live* change what may change while the server runs, whenever *fd* is readable; before ``run``."""
        self._publisher.live = lambda: live.state
        if fd < 0:
            live.state = LiveState("changes of the file are not noticed: the kernel has no inotify instance left")
            return
        self._door.watch(fd)
        self._loop.follow(fd, live.turn)

    def close(self) -> None:
        """Release everything in the opposite order. Idempotent."""
        self._resources.close()

    def _listen(self) -> None:
        listen = self._config.listen
        if listen.socket_path:
            self._door.bind_unix(listen.socket_path, listen.socket_mode)
        if listen.tcp_host:
            _, secret = read_key(listen.curve_key_file)
            self._door.bind_curve(listen.tcp_host, listen.tcp_port, secret)
            if listen.plain_bulk_port >= 0:
                self._plain_bulk_port = self._door.bind_plain_bulk(listen.tcp_host, listen.plain_bulk_port)
        self._door.watch(self.inbox.fileno())

    def _make_rings(self, engine: Engine, arena: Segments, answers: Answers, numbers: Numbers) -> Rings:
        limits = MoverLimits(start_s=self._config.mover.start_s, revoke_s=self._config.mover.revoke_s)
        movers = Movers(partial(memory_of, arena), self._mover_command, limits)
        return Rings(movers, engine.movers, answers, numbers, self._clocks.monotonic, self._config.mover.checksums)

    def _make_parts(self, engine: Engine, arena: Segments) -> Parts:
        config, clock = self._config, self._clocks.monotonic
        numbers = Numbers()
        answers = Answers(self._door, self.boot_id, numbers, self._on_full)
        return Parts(
            config=config,
            authenticator=authenticator(config.auth),
            engine=engine,
            connections=Connections(config.limits.clients, config.leases.client_silent_s),
            answers=answers,
            lanes=Lanes(config.limits.lanes, self.inbox.post, clock),
            numbers=numbers,
            rings=self._make_rings(engine, arena, answers, numbers),
            clock=clock,
        )

    def _open_descriptors(self, arena: Segments) -> DescriptorServer | None:
        listen = self._config.listen
        if not listen.socket_path:
            return None
        grants = Grants(
            client_of=self._parts.connections.by_ticket,
            access=self._parts.engine.region_access,
            died=self._on_death,
            unwatched=self._on_unwatched,
        )
        server = DescriptorServer(arena, grants, self.boot_id, self._config.limits.clients)
        server.bind(listen.socket_path + SUFFIX, listen.socket_mode)
        self._door.watch(server.fileno())
        return server

    def _make_publisher(self, recovered_chunks: int) -> Publisher:
        facts = Facts(
            server_id=self._config.server_id or socket.gethostname(),
            boot_id=self.boot_id,
            endpoints=self.endpoints,
            recovered_chunks=recovered_chunks,
            started_s=self._clocks.monotonic(),
        )
        sight = self._gpus.sight if self._gpus else lambda: GpuSight(None, "")
        return Publisher(self._parts, facts, self._trouble, lambda: self._dispatcher.draining, sight)

    def _watch_gpus(self) -> GpuWatch | None:
        gpu = self._config.gpu
        return GpuWatch(visible_gpus, gpu.look_s, self._clocks.monotonic) if gpu.required else None

    def _make_loop(self) -> Loop:
        caching, bulk = CachingVerbs(self._parts), BulkVerbs(self._parts)
        sessions = SessionVerbs(self._parts, self._make_rim())
        for verbs in (sessions, caching, bulk):
            verbs.add_to(self._dispatcher)
        self._dispatcher.seal()
        loop = Loop(self._door, self._dispatcher, self._parts, (caching, bulk), self.inbox, self._publish)
        if self._descriptors is not None:
            loop.watch(self._descriptors)
        return loop

    def _make_rim(self) -> Rim:
        descriptors = self._descriptors
        return Rim(
            wall=self._clocks.wall,
            server_id=self._config.server_id or socket.gethostname(),
            descriptor_socket=self._config.listen.socket_path + SUFFIX if descriptors else "",
            plain_bulk_port=self._plain_bulk_port,
            watches=descriptors.watches if descriptors else lambda _: False,
            goodbye=descriptors.forget if descriptors else lambda _: None,
            mover_listens=self._places.next,
            neighbours=neighbours(self._config.servers_file),
            snapshot=self._publish,
            draining=lambda: self._dispatcher.draining,
        )

    def _publish(self) -> ServerSnapshot:
        self.snapshot = self._publisher.snapshot()
        return self.snapshot

    def _trouble(self) -> str:
        return "" if self._loop.lanes_work else "a copy of streamed bytes does not end"

    def _close_faces(self) -> None:
        self._faces.close()

    def _on_full(self, client: Client) -> None:
        # Later: the sender of this answer is still at work on the client.
        self.inbox.post(lambda: self._drop_unread(client))

    def _drop_unread(self, client: Client) -> None:
        if self._parts.connections.find(client.client_id) is client:
            self._parts.lose(client, "unread")

    def _on_death(self, client_id: bytes) -> None:
        client = self._parts.connections.find(client_id)
        if client is not None:
            self._parts.lose(client, "died", proven_dead=True)
        else:
            self._parts.engine.writers_proven_dead(client_id, self._clocks.monotonic())

    def _on_unwatched(self, client_id: bytes) -> None:
        client = self._parts.connections.find(client_id)
        if client is not None:
            client.watched = False


def run_server(
    config: ServerConfig, mover_command: Sequence[str] = MOVER_COMMAND, source: ConfigFile | None = None
) -> int:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once.

    Args:
        config: what it should be.
        mover_command: the movers' program.
        source: the file that *config* is from; what may change while the server runs is taken from it.

    Returns:
        0 after a drain, 1 if the server cannot start (one line of the log says why).

    Raises:
        Exception: a defect of the server; the log has it, too.
    """
    configure(config.log, sys.stderr)
    clocks = Clocks()
    ask_for_short_slices()
    try:
        with ExitStack() as resources:
            arena = resources.enter_context(open_arena(config.l1, config.pool_uid, _living(config, source)))
            engine = Engine(config, arena)
            recovery = engine.recover(clocks.monotonic())
            server = resources.enter_context(Server(config, arena, engine, recovery.chunks, clocks, mover_command))
            if source is not None:
                live = LiveConfig(config, source, arena, server.parts)
                server.follow(source.watch(), live)
            _handle_signals(server)
            arena.grow()
            _announce(server, config, recovery.chunks)
            # All that is alive by now stays: looking through it for garbage would stop the loop for 40 ms.
            gc.freeze()
            server.run()
    except _CANNOT_START as e:
        log.error("server.not_started", error=str(e))  # noqa: TRY400 - the text says it all, a traceback would hide it
        return 1
    log.info("server.stopped")
    return 0


def _living(config: ServerConfig, source: ConfigFile | None) -> Living | None:
    """The list of living pools was true when its file was written; without a file nobody knows when."""
    if config.living_pools is None or source is None:
        return None
    return Living(config.living_pools, source.written_at)


def _announce(server: Server, config: ServerConfig, recovered_chunks: int) -> None:
    log.info(
        "server.ready",
        version=__version__,
        endpoints=list(server.endpoints),
        operations=server.operations_address,
        boot_id=server.boot_id.hex(),
        l1_bytes=config.l1.size_bytes,
        recovered_chunks=recovered_chunks,
    )


def _handle_signals(server: Server) -> None:
    def stop(number: int, _frame: object) -> None:
        for known in (signal.SIGTERM, signal.SIGINT):
            signal.signal(known, _exit_now)
        log.info("server.draining", signal=signal.Signals(number).name)
        server.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _exit_now(_number: int, _frame: object) -> None:
    """The arena's headers are right at every instant, so nothing is lost that a longer exit would have kept."""
    os._exit(1)
