# SPDX-License-Identifier: Apache-2.0
"""`kvpool server`: read the configuration, then hand over to the server."""

import argparse
import contextlib
import importlib

from kvpool.cli.errors import Failure
from kvpool.cli.lean import hidden
from kvpool.cli.machine import SERVER_PACKAGES, package_versions
from kvpool.cli.settings import server_config, server_decoder

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the server logs where it listens.

    Raises:
        UsageError: the configuration is wrong.
        Failure: the server cannot start.
    """
    config = server_config(args)
    needed = [name for name in SERVER_PACKAGES if name != "xxhash"]
    if missing := [name for name, version in package_versions(tuple(needed)).items() if version is None]:
        raise Failure(
            f"{', '.join(missing)} not installed; install the server's packages: pip install 'kvpool[server]'"
        )
    with hidden("rich"):
        server = importlib.import_module("kvpool.server.compose")
        source = importlib.import_module("kvpool.server.source")
    with contextlib.ExitStack() as resources:
        file = resources.enter_context(source.ConfigFile(args.config, server_decoder(args))) if args.config else None
        code: int = server.run_server(config, source=file)
    return code
