# SPDX-License-Identifier: Apache-2.0
"""A real cache server in its own process, on a folder of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ("-m", "kvpool.cli.main")
WITH_FAKE_MOVERS = (str(Path(__file__).with_name("ring_server.py")),)


class ServerProcess:
    """Starts ``kvpool server``; the same folder keeps its segments over restarts. *code*: where kvpool lies."""

    def __init__(
        self,
        folder: Path,
        *,
        size_bytes: int = 64 << 20,
        code: Path = ROOT / "cacheserver",
        program: Sequence[str] = PROGRAM,
        **sections,
    ) -> None:
        self.folder = folder
        self._program = program
        self.code = code
        self.path = str(folder / "kvpool.sock")
        self.address = f"ipc://{self.path}"
        self.config = {
            "chunk_tokens": 16,
            "drain_s": 0.5,
            "listen": {"socket_path": self.path},
            "l1": {"size_bytes": size_bytes, "directory": str(folder / "l1"), "allow_disk": True, "verify_loads": 1.0},
            "leases": {"heartbeat_s": 0.2, "client_silent_s": 1.0},
            "http": {"operations_host": ""},
        }
        for name, section in sections.items():
            self.config[name] = self.config.get(name, {}) | section
        self._process: subprocess.Popen | None = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc):
        self.kill()

    def start(self) -> None:
        """Start, unless it runs; clients find it as soon as it listens."""
        if self._process is not None and self._process.poll() is None:
            return
        file = self.folder / "server.json"
        file.write_text(json.dumps(self.config))
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._program, "server", "--config", str(file)],
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join((str(self.code), os.environ.get("PYTHONPATH", "")))},
            )

    @property
    def ended(self) -> bool:
        """True if it was started and ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def terminate(self) -> int:
        """SIGTERM and wait; returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(10)
        self._process = None
        return code

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self._process.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Kill and start again on the same folder."""
        self.kill()
        self.start()

    @property
    def endpoints(self) -> list[str]:
        """Addresses of the last start; empty until it is ready."""
        return self._ready().get("endpoints", [])

    @property
    def operations(self) -> str:
        """Host and port of the operations face of the last start; empty until it is ready."""
        return self._ready().get("operations", "")

    def _ready(self) -> dict[str, Any]:
        ready = [json.loads(line) for line in self.log.splitlines() if '"server.ready"' in line]
        return ready[-1] if ready else {}

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text()
