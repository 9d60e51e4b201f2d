# SPDX-License-Identifier: Apache-2.0
"""``python -m kvpool_operator controller`` (or ``webhook``): settings from the environment, then run."""

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Coroutine, Mapping

from kvpool_operator.admission import WebhookSettings
from kvpool_operator.settings import Settings

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status is not zero if it ended by a failure."""
    parser = argparse.ArgumentParser(prog="kvpool-operator", description="Runs the kvpool operator.")
    parser.add_argument("command", choices=("controller", "webhook"))
    command = parser.parse_args(arguments).command
    environ = {"KVPOOL_OPERATOR_IDENTITY": socket.gethostname(), **os.environ}
    try:
        work = _controller(environ) if command == "controller" else _webhook(environ)
    except ValueError as e:
        parser.error(str(e))
    try:
        asyncio.run(work)
    except ExceptionGroup as group:
        sys.stderr.writelines(f"{type(e).__name__}: {e}\n" for e in group.exceptions)
        return 1
    return 0


def _controller(environ: Mapping[str, str]) -> Coroutine[None, None, None]:
    settings = Settings.read(environ)
    from kvpool_operator.controller import run  # noqa: PLC0415 - heavy, and not needed to say that settings are wrong

    return run(settings)


def _webhook(environ: Mapping[str, str]) -> Coroutine[None, None, None]:
    settings = WebhookSettings.read(environ)
    from kvpool_operator.admission.server import run  # noqa: PLC0415 - as above

    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
