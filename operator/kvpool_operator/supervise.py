# SPDX-License-Identifier: Apache-2.0
"""Keeps the watches alive: starts them again when they end by a failure, and gives up when they keep failing."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

__all__ = ["KeepsFailingError", "supervise"]

_FAILURES: Final = 5
_WITHIN_S: Final = 600.0
_REST_S: Final = 1.0


class KeepsFailingError(RuntimeError):
    """Five failures within ten minutes; the process must end, so that somebody notices."""


async def supervise(
    run: Callable[[], Awaitable[None]],
    again: Callable[[BaseException], None],
    clock: Callable[[], float],
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Run *run* until it returns by itself; *again* is told of each failure before the next start.

    Raises:
        KeepsFailingError: it failed five times within ten minutes.
    """
    failures: deque[float] = deque(maxlen=_FAILURES)
    while True:
        try:
            await run()
        except Exception as e:
            failures.append(clock())
            if len(failures) == _FAILURES and failures[-1] - failures[0] < _WITHIN_S:
                raise KeepsFailingError(f"the watches failed {_FAILURES} times, last by {e!r}") from e
            again(e)
            await rest(_REST_S * 2 ** (len(failures) - 1))
        else:
            return
