# SPDX-License-Identifier: Apache-2.0
"""One line on standard error that says what a long command is doing."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TextIO

__all__ = ["progress"]

AFTER_S: Final = 2.0
"""Shorter work shows nothing."""


@contextmanager
def progress(text: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show *text* while the block runs, with a second hand, once it runs for longer than 2 s.

    On a terminal the line is rewritten and removed at the end; elsewhere it is printed once.
    """
    out = stream or sys.stderr
    over = threading.Event()
    ticker = threading.Thread(target=_tick, args=(text, out, over), name="progress", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        over.set()
        ticker.join()


def _tick(text: str, out: TextIO, over: threading.Event) -> None:
    if over.wait(AFTER_S):
        return
    if not out.isatty():
        print(f"... {text}", file=out, flush=True)
        return
    seconds = AFTER_S
    while not over.wait(1.0):
        seconds += 1
        print(f"\r... {text} ({seconds:.0f} s)\x1b[K", end="", file=out, flush=True)
    print("\r\x1b[K", end="", file=out, flush=True)
