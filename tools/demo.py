# SPDX-License-Identifier: Apache-2.0
"""The whole thing on a laptop, in acts: a shared prefix, the operator on a control plane, real pods.

    python -m tools.demo [--only ACT]

An act that lacks something says so in one line and the next one begins. Everything started is ended and removed on
every path. Results go to .demo/.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from tools import demo_cache, demo_cluster, demo_nodes
from tools.demo_act import ActSkipped

from kvpool.cli.errors import CommandError

__all__ = ["ACTS", "Act", "main"]

ROOT: Final = Path(__file__).resolve().parents[1]
INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class Act:
    """One part of the demo."""

    name: str
    title: str
    play: Callable[[argparse.Namespace], str]
    """Runs it with the command's options; returns what went wrong, empty for a success."""


ACTS: Final = (
    Act("cache", "a prompt's prefix, computed once", lambda o: demo_cache.play(o.out, o.tokens)),
    Act("cluster", "the operator on a control plane", lambda o: demo_cluster.play(o.out)),
    Act("nodes", "real pods on two real nodes", lambda o: demo_nodes.play(o.out)),
)


def main(arguments: Sequence[str] | None = None, acts: Sequence[Act] = ACTS) -> int:
    """Play all *acts*; 0 if none failed, 1 otherwise."""
    parser = argparse.ArgumentParser(description="Show what kvpool does, on this machine.", allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the shared prompt (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / ".demo", help="folder for the results (default: .demo)")
    parser.add_argument("--only", choices=[a.name for a in acts], help="this act alone")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with _terminated_like_interrupted():
            wanted = [a for a in acts if options.only in (None, a.name)]
            failed = [a.name for a in wanted if not _played(a, options)]
    except KeyboardInterrupt:
        print("demo: interrupted; everything it started is ended", file=sys.stderr)
        return INTERRUPTED
    return 1 if failed else 0


def _played(act: Act, options: argparse.Namespace) -> bool:
    """Play *act* and say how it went; False if it failed."""
    print(f"\n=== {act.title} ===", flush=True)
    try:
        wrong = act.play(options)
    except ActSkipped as e:
        print(f"skipped: {e}", flush=True)
        return True
    except (CommandError, AssertionError, TimeoutError) as e:  # the tests' harnesses assert
        wrong = str(e)
    if wrong:
        print(f"demo: {act.name}: FAILED: {wrong}", file=sys.stderr)
    return not wrong


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
