# SPDX-License-Identifier: Apache-2.0
"""Entry point of `kvpool`: parses the command line, then imports only the module of the command that was asked for."""

import importlib
import os
import sys
from collections.abc import Sequence

from kvpool.cli.errors import CommandError
from kvpool.cli.parser import build_parser

__all__ = ["main"]

INTERRUPTED = 130
"""What a shell reports for a program that SIGINT ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong usage or configuration.

    Argparse itself raises SystemExit: 2 for options it does not know, 0 after --help.
    """
    args = build_parser().parse_args(argv)
    try:
        code: int = importlib.import_module(args.module).run(args)
        sys.stdout.flush()
    except CommandError as e:
        print(f"kvpool {args.command}: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `kvpool status | head`; the interpreter's own flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
