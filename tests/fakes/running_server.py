# SPDX-License-Identifier: Apache-2.0
"""A real server, engine and arena on a thread of the test's own process."""

import threading
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.raw_client import RawClient

from kvpool.arena.opening import open_arena
from kvpool.config import HttpConfig, L1Config, LeaseConfig, LimitConfig, ListenConfig, ServerConfig
from kvpool.engine.engine import Engine
from kvpool.server.compose import Clocks, Server

MIB = 1 << 20
END_S = 10


def server_config(folder: Path, **changes):
    """A small server: 16 MiB on disk, a Unix socket, no HTTP."""
    values = {
        "listen": ListenConfig(socket_path=str(folder / "run" / "kvpool.sock")),
        "l1": L1Config(size_bytes=16 * MIB, directory=str(folder / "arena"), allow_disk=True, persist=False),
        "http": HttpConfig(operations_host=""),
        "limits": LimitConfig(frame_bytes=64 << 10, chunks=512, clients=16),
        "leases": LeaseConfig(),
        "server_id": "test",
        "drain_s": 0.2,
    }
    return ServerConfig(**(values | changes))


class Running:
    """The server and how to reach it."""

    def __init__(self, server, config):
        self.server = server
        self.config = config
        self.address = f"ipc://{config.listen.socket_path}"
        self.failure = None

    def run(self):
        try:
            self.server.run()
        except Exception as e:  # noqa: BLE001 - the end of the block reports it
            self.failure = e

    def connect(self, **options):
        return RawClient(self.address, **options)

    def tcp(self):
        """The TCP endpoint."""
        return next(e for e in self.server.endpoints if e.startswith("tcp://"))

    def ask(self, question):
        return self.server.ask(question, END_S)

    def counter(self, key):
        """The value of one series now."""
        parts = self.server.parts
        # The engine's own counters stand among the published ones as of the last second.
        return self.ask(lambda: (parts.numbers.published() | parts.engine.numbers().counters)[key])

    def numbers(self):
        return self.ask(self.server.parts.engine.numbers)


@contextmanager
def running_server(folder, *, wall=None, engine=None, **changes):
    """Serve until the end of the block, then drain; a defect of the loop fails the test."""
    config = server_config(folder, **changes)
    clocks = Clocks(wall=wall) if wall else Clocks()
    with open_arena(config.l1, config.pool_uid) as arena:
        used = (engine or Engine)(config, arena)
        recovered = used.recover(clocks.monotonic())
        with Server(config, arena, used, recovered.chunks, clocks) as server:
            running = Running(server, config)
            thread = threading.Thread(target=running.run, name="server", daemon=True)
            thread.start()
            try:
                yield running
            finally:
                server.request_stop()
                thread.join(END_S)
                assert not thread.is_alive()
    assert running.failure is None, running.failure
