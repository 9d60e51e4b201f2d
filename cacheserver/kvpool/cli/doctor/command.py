# SPDX-License-Identifier: Apache-2.0
"""`kvpool doctor`: look, judge, report. Exit code 1 if anything fails."""

import argparse
from collections.abc import Sequence

import msgspec

from kvpool.cli.doctor.checks import Check, Level, check_all, worst
from kvpool.cli.doctor.gather import gather
from kvpool.cli.progress import progress
from kvpool.cli.settings import client_config, server_config
from kvpool.config import ClientConfig

__all__ = ["as_text", "run"]


def run(args: argparse.Namespace) -> int:
    """Check this machine and print what was found.

    Raises:
        UsageError: the configuration to check is wrong.
    """
    server, client = server_config(args), client_config(args)
    with progress("looking at this machine"):
        named = bool(args.server) or client.server != ClientConfig().server
        checks = check_all(gather(server, client, args.engine_python, named=named))
    print(msgspec.json.encode({"worst": worst(checks), "checks": checks}).decode() if args.json else as_text(checks))
    return 1 if worst(checks) is Level.FAIL else 0


def as_text(checks: Sequence[Check]) -> str:
    """Return the report for people: one line a check, and the remedy below it where one is needed."""
    width = max(len(c.name) for c in checks)
    lines: list[str] = []
    for c in checks:
        lines.append(f"{c.level.ljust(4)}  {c.name.ljust(width)}  {c.text}")
        if c.remedy:
            lines.append(f"{'':4}  {'':{width}}  -> {c.remedy}")
    return "\n".join(lines)
