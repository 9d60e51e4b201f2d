# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, as the tests of this folder start and watch them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.fakes.server_process import ServerProcess

CHILD = str(Path(__file__).with_name("client_child.py"))
PATIENCE_S = 90.0
SPARE_BYTES = 16 << 20


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
        self.process = subprocess.Popen(
            [*before, sys.executable, CHILD, server.address, str(seed), *commands],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            env=os.environ | own | (environ or {}),
            **options,
        )

    def begins(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def does(self, command: str) -> None:
        self.begins(command)
        self.says(command)

    def hears(self) -> str:
        return self.process.stdout.readline().strip()

    def says(self, wanted: str) -> None:
        line = self.hears()
        if line != wanted:
            self.process.kill()
            said = self.process.stderr.read()[-3000:]
            self.closed(self.process.wait())
            pytest.fail(f"{line!r} instead of {wanted!r}: {said}")

    def ends(self) -> int:
        self.process.stdin.close()
        return self.closed(self.process.wait(PATIENCE_S))

    def killed(self) -> None:
        self.process.kill()
        self.closed(self.process.wait())

    def closed(self, code: int) -> int:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()
        return code
