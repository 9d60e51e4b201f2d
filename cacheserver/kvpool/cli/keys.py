# SPDX-License-Identifier: Apache-2.0
"""`kvpool keys`: a CURVE key pair for a server that listens on TCP."""

import argparse

from kvpool.cli.errors import Failure
from kvpool.server.keys import KeyFileError, make_key

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Write the secret key to a new file of mode 0600 and print the public one.

    Raises:
        Failure: the file exists or cannot be written.
    """
    try:
        print(make_key(args.out))
    except KeyFileError as e:
        raise Failure(f"--out: {e}") from e
    return 0
