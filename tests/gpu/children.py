# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, as the tests of this folder start and watch them."""

import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.fakes.server_process import ServerProcess
from tests.gpu.waiting import PATIENCE_S, START_S

CHILD = str(Path(__file__).with_name("client_child.py"))
SPARE_BYTES = 16 << 20
READY = "ready"


class Child:
    """An engine's process. Without commands it takes them one by one, see ``begins``."""

    def __init__(
        self,
        server: ServerProcess,
        seed: int,
        *commands: str,
        before: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
        **options,
    ) -> None:
        cache = tempfile.mkdtemp()
        Path(cache).chmod(0o777)
        own = {"TRITON_CACHE_DIR": cache, "HOME": cache, "PYTHONDONTWRITEBYTECODE": "1"}
        self._server, self._heard = server, b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [*before, sys.executable, CHILD, server.address, str(seed), *commands],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            cwd="/",
            env=os.environ | own | (environ or {}),
            **options,
        )

    def begins(self, command: str) -> None:
        self.process.stdin.write(command.encode() + b"\n")

    def does(self, command: str) -> None:
        self.begins(command)
        self.says(command)

    def hears(self, timeout_s: float = PATIENCE_S) -> str:
        """The next line; empty if it ended, and the test has failed if it says nothing for so long."""
        out, ends_s = self.process.stdout, time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            if not select.select([out], [], [], max(0.0, ends_s - time.monotonic()))[0]:
                self.fails(f"the engine said nothing for {timeout_s:g} s")
            if not (more := os.read(out.fileno(), 1 << 16)):
                break
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode().strip()

    def says(self, wanted: str) -> None:
        line = self.hears(START_S if wanted == READY else PATIENCE_S)
        if line != wanted:
            self.fails(f"the engine said {line!r} instead of {wanted!r}")

    def ends(self) -> int:
        self.process.stdin.close()
        try:
            return self.closed(self.process.wait(PATIENCE_S))
        except subprocess.TimeoutExpired:
            self.fails(f"the engine did not end within {PATIENCE_S:g} s")

    def killed(self) -> None:
        self.process.kill()
        self.closed(self.process.wait())

    def closed(self, code: int) -> int:
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            stream.close()
        return code

    def fails(self, why: str) -> None:
        """Fail the test, with the last words of the engine and of its server."""
        self.process.kill()
        code = self.process.wait()
        self._errors.seek(0)
        errors = self._errors.read()[-3000:].decode(errors="replace")
        self.closed(code)
        pytest.fail(
            f"{why}; its exit code: {code}; its errors:\n{errors}\nthe server's log:\n{self._server.log[-2000:]}"
        )
