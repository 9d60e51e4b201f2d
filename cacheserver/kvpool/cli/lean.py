# SPDX-License-Identifier: Apache-2.0
"""Imports without what nobody needs of them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["hidden"]


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Import as if the packages *names* were not installed, unless they are imported already.

    structlog takes rich for tracebacks on terminals wherever it finds it: in a developer's environment that is a
    quarter of the time in which a server starts, and no line of the server's log shows it.
    """
    mine = [name for name in names if name not in sys.modules]
    for name in mine:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in mine:
            del sys.modules[name]
