# SPDX-License-Identifier: Apache-2.0
"""A process that has imported vLLM once and forks engines: importing takes longer than all else of a small one's start.

What is forked has run nothing of an engine before. Where it matters that two processes share nothing at all, not even
the seed of Python's hashes, tests use the HTTP server, which is started from nothing each time.
"""

import json
import os
import select
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

STOP_S = 15.0


class Forked:
    """A process that the nursery forked: as much of ``subprocess.Popen`` as tests use."""

    def __init__(self, pid: int, handle: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        """Take over the process handle (a descriptor)."""
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._handle = handle
        self._ended = False

    def poll(self) -> int | None:
        """0 if it has ended; how is not known."""
        if not self._ended and select.select([self._handle], [], [], 0)[0]:
            self._ended = True
            os.close(self._handle)
        return 0 if self._ended else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it has not ended in *timeout* seconds.
        """
        if not self._ended:
            select.select([self._handle], [], [], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return 0


class Nursery:
    """See the module; one for each python, made when the first engine is asked for."""

    def __init__(self, python: Path, environ: dict[str, str]) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker = Path(__file__).resolve().parent / "engine_worker.py"
        with theirs:
            self._process = subprocess.Popen(
                [str(python), str(worker), str(theirs.fileno())],
                env=os.environ | environ, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )  # fmt: skip

    def fork(self, environ: dict[str, str], log: Path, timeout_s: float) -> Forked:
        """Fork a process with its standard output as a pipe, all else that it says in *log*; its folder is the log's.

        Args:
            environ: to be set in it, on top of what this process had when the nursery was made.
            log: file to append to.
            timeout_s: how long the nursery may take.
        """
        child_in, our_in = os.pipe()
        our_out, child_out = os.pipe()
        with log.open("ab") as out:
            self._ours.settimeout(timeout_s)
            message = json.dumps({"environ": environ, "folder": str(log.parent)}).encode()
            socket.send_fds(self._ours, [message], [child_in, child_out, out.fileno()])
            answer, handles, _, _ = socket.recv_fds(self._ours, 64, 1)
        os.close(child_in)
        os.close(child_out)
        assert handles, "the nursery ended"
        return Forked(int(answer), handles[0], os.fdopen(our_in, "wb"), os.fdopen(our_out, "rb"))

    def close(self) -> None:
        """End it; what it forked lives on."""
        self._ours.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._process.kill()
        self._process.wait(STOP_S)


NURSERIES: dict[Path, Nursery | None] = {}
"""By python, those that are open; None until the first engine is asked for."""


@contextmanager
def nursery(python: Path) -> Iterator[None]:
    """As long as this is open, engines of *python* that are not to be as in production are forked."""
    NURSERIES[python] = None
    try:
        yield
    finally:
        opened = NURSERIES.pop(python)
        if opened is not None:
            opened.close()


def forked(python: Path, environ: dict[str, str], log: Path, timeout_s: float) -> Forked | None:
    """Fork a process from the open nursery of *python*; None if there is none."""
    if python not in NURSERIES:
        return None
    opened = NURSERIES[python]
    if opened is None:
        opened = NURSERIES[python] = Nursery(python, environ)
    return opened.fork(environ, log, timeout_s)
