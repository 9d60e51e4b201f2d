# SPDX-License-Identifier: Apache-2.0
"""A server of one's own: a child process with its own folder, memory and configuration, removed at the end."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final, Self

import msgspec

from kvpool.cli.connect import listening_problem
from kvpool.cli.errors import Failure
from kvpool.config import SERVER_ENV_PREFIX, ClientConfig, ListenConfig, ServerConfig, render

__all__ = ["OwnServer"]

START_S: Final = 60.0
STOP_S: Final = 10.0
LOOK_AGAIN_S: Final = 0.005
LOG_LINES: Final = 5
SETTLE_S: Final = 60.0
SETTLED_S: Final = 0.5
IDLE_SHARE: Final = 0.1


class OwnServer:
    """Starts, ends and restarts one server. A context manager: at its end nothing of it is left.

    The child is in a process group of its own: Ctrl-C reaches this process alone, which then ends the child.
    """

    def __init__(self, l1_bytes: int, *, memory: str = "/dev/shm", config: ServerConfig | None = None) -> None:  # noqa: S108
        """Make the folders.

        Args:
            l1_bytes: size of the arena.
            memory: folder on a tmpfs below which the arena's own folder is made.
            config: everything else; where it listens and where its memory lies is replaced.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="kvpool-"))
        self.memory = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir=memory))
        self.socket = self.folder / "kvpool.sock"
        self.log = self.folder / "server.log"
        base = config or ServerConfig()
        self._config = msgspec.structs.replace(
            base,
            listen=ListenConfig(socket_path=str(self.socket), socket_mode=0o600),
            l1=msgspec.structs.replace(base.l1, size_bytes=l1_bytes, directory=str(self.memory)),
            http=msgspec.structs.replace(base.http, operations_host="", admin_socket=str(self.folder / "admin.sock")),
        )
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it.

        Raises:
            Failure: it did not come up; the text has the last lines of its log.
        """
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(self, *_: object) -> None:
        """End it and remove its folders."""
        self.remove()

    @property
    def client(self) -> ClientConfig:
        """How to reach it."""
        return ClientConfig(server=f"ipc://{self.socket}")

    @property
    def admin_socket(self) -> str:
        """Where its admin face listens."""
        return self._config.http.admin_socket

    @property
    def config(self) -> ServerConfig:
        """What it was started with."""
        return self._config

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._child is not None
        return self._child.pid

    def start(self) -> Self:
        """Start the process and wait until its socket accepts connections.

        Raises:
            Failure: it ended, or did not listen within a minute.
        """
        file = self.folder / "server.json"
        file.write_bytes(render(self._config))
        environ = {k: v for k, v in os.environ.items() if not k.startswith(SERVER_ENV_PREFIX)}
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", "kvpool.cli.main", "server", "--config", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                process_group=0,
            )
        self._wait_until_listening(self._child)
        return self

    def settle(self) -> Self:
        """Wait until it has taken its memory, in the background: until it uses hardly any of a processor's time.

        Raises:
            Failure: that takes more than a minute.
        """
        pause, ends_s = threading.Event(), time.monotonic() + SETTLE_S
        used_s = self._processor_s()
        while time.monotonic() < ends_s:
            pause.wait(SETTLED_S)
            before_s, used_s = used_s, self._processor_s()
            if used_s - before_s <= IDLE_SHARE * SETTLED_S:
                return self
        raise Failure(f"the server is still busy after {SETTLE_S:.0f} s; the end of its log:\n{self._log_end()}")

    def _processor_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the process and wait for that; SIGKILL after ten seconds. Does nothing if it is not running."""
        if self._child is None:
            return
        self._child.send_signal(how)
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child = None

    def remove(self) -> None:
        """End the process and remove its folders; idempotent."""
        self.end()
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_until_listening(self, child: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_S
        pause = threading.Event()
        while listening_problem(self.client.server):
            if child.poll() is not None or time.monotonic() > deadline:
                state = "is not listening yet" if child.poll() is None else f"ended with code {child.returncode}"
                raise Failure(f"the server {state}; the end of its log:\n{self._log_end()}")
            pause.wait(LOOK_AGAIN_S)

    def _log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
