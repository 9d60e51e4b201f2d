# SPDX-License-Identifier: Apache-2.0
"""Starts and ends the load-generating processes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final, Self

import msgspec

from kvpool.cli.bench.load import LoadOrder, LoadResult
from kvpool.cli.errors import Failure

__all__ = ["Fleet"]

END_S: Final = 5.0


class Fleet:
    """Some processes, one order each. A context manager: at its end none is left."""

    def __init__(self, orders: Sequence[LoadOrder]) -> None:
        """Start nothing yet."""
        self._orders = orders
        self.members: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        """Start all and wait until each is connected and ready.

        Raises:
            Failure: one of them failed; the text is its own.
        """
        try:
            for order in self._orders:
                self.members.append(_start(order))
            for member in self.members:
                self._line(member)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what still runs and wait for it."""
        for member in self.members:
            member.kill()
        for member in self.members:
            member.communicate(timeout=END_S)

    def go(self) -> None:
        """Let all begin."""
        for member in self.members:
            assert member.stdin is not None
            member.stdin.write("go\n")
            member.stdin.flush()

    def results(self) -> list[LoadResult]:
        """Wait for all.

        Raises:
            Failure: one of them failed; the text is its own.
        """
        return [msgspec.json.decode(self._line(member), type=LoadResult) for member in self.members]

    def _line(self, member: subprocess.Popen[str]) -> str:
        assert member.stdout is not None
        line = member.stdout.readline()
        if not line:
            _, why = member.communicate(timeout=END_S)
            raise Failure(f"a client of the load failed: {why.strip() or f'code {member.returncode}'}")
        return line


def _start(order: LoadOrder) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "kvpool.cli.bench.load"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
        text=True,
        process_group=0,
    )
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(order).decode() + "\n")
    child.stdin.flush()
    return child
