# SPDX-License-Identifier: Apache-2.0
"""The client's one net under unexpected exceptions: nothing of ours or of a block port may end a thread unseen."""

import logging
from collections.abc import Callable

__all__ = ["attempt"]

log = logging.getLogger("kvpool.client")


def attempt(what: str, step: Callable[[], None]) -> Exception | None:
    """Run *step*; an exception is logged with its traceback and returned, never raised.

    This code runs inside an engine: whatever goes wrong here costs the cache, not the engine.
    """
    try:
        step()
    except Exception as e:
        log.exception("%s failed", what)
        return e
    return None
