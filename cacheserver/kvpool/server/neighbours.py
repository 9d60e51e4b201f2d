# SPDX-License-Identifier: Apache-2.0
"""Where the pool's other servers are, as the list says that is mounted beside the configuration."""

from collections.abc import Callable
from pathlib import Path

import structlog

from kvpool.model.whereabouts import candidates

__all__ = ["neighbours"]

log = structlog.get_logger()


def neighbours(path: str) -> Callable[[str], tuple[str, ...]]:
    """Return what finds addresses by a server's id in the list at *path*; nothing without a list that can be read.

    The file is read for each question: it changes under the server, it is small, and questions are rare.
    """

    def found(server_id: str) -> tuple[str, ...]:
        if not path:
            return ()
        try:
            return candidates(Path(path).read_text().splitlines(), server_id)
        except (OSError, ValueError) as e:
            log.warning("servers.unreadable", path=path, error=str(e))
            return ()

    return found
