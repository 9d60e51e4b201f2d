# SPDX-License-Identifier: Apache-2.0
"""``python -m kvpool_operator controller``: settings from the environment, then run."""

import argparse
import asyncio
import os
import socket
import sys

from kvpool_operator.settings import Settings

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status is not zero if it ended by a failure."""
    parser = argparse.ArgumentParser(prog="kvpool-operator", description="Runs the kvpool operator.")
    parser.add_argument("command", choices=("controller",))
    parser.parse_args(arguments)
    try:
        settings = Settings.read({"KVPOOL_OPERATOR_IDENTITY": socket.gethostname(), **os.environ})
    except ValueError as e:
        parser.error(str(e))
    from kvpool_operator.controller import run  # noqa: PLC0415 - heavy, and not needed to say that settings are wrong

    try:
        asyncio.run(run(settings))
    except ExceptionGroup as group:
        sys.stderr.writelines(f"{type(e).__name__}: {e}\n" for e in group.exceptions)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
