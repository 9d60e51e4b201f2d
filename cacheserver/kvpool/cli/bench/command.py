# SPDX-License-Identifier: Apache-2.0
"""What every bench command needs around its cells: a clean end, and the written report."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec

from kvpool.cli.bench.results import BenchReport
from kvpool.cli.errors import Failure

__all__ = ["terminated_like_interrupted", "write_report"]


def write_report(path: str, report: BenchReport) -> None:
    """Write the results as JSON.

    Raises:
        Failure: the file cannot be written.
    """
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as e:
        raise Failure(f"--json {path}: {e.strerror}; name a file in a folder that this user may write to") from e


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end everything that was started, as Ctrl-C does."""

    def interrupt(_: int, __: FrameType | None) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
