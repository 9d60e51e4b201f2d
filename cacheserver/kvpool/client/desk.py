# SPDX-License-Identifier: Apache-2.0
"""Where the link's thread and all others meet: the state, and the calls that wait to be taken."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kvpool.client.call import Call
from kvpool.client.state import LinkState
from kvpool.client.supervise import attempt
from kvpool.model.errors import Busy, CacheError, ServerUnavailable, StaleBoot
from kvpool.model.reasons import UncachedReason

__all__ = ["Desk"]

log = logging.getLogger("kvpool.client")

_QUEUE_CALLS: Final = 4096


class Desk:
    """Takes calls while a session is open. Any thread, but ``publish`` and ``take``, which are the link thread's.

    State and admission change under one lock: a call is either refused, or taken by the session that it was meant for.
    """

    def __init__(self, server: str, wake: Callable[[], None], on_state: Callable[[LinkState], None] | None) -> None:
        self._server = server
        self._wake = wake
        self._on_state = on_state
        self._changed = threading.Condition()
        self._open = False
        self._calls: list[tuple[Call[Any], bool]] = []
        self.state = LinkState(healthy=False, reason=UncachedReason.STARTING)

    def submit(self, call: Call[Any], *, bulk: bool, epoch: int | None) -> None:
        """Leave *call* for the link's thread, or end it at once if it cannot be taken."""
        with self._changed:
            error = self._objection(epoch)
            if error is None:
                self._calls.append((call, bulk))
            first = len(self._calls) == 1
        if error is not None:
            call.fail(error)
        elif first:
            self._wake()

    def take(self) -> list[tuple[Call[Any], bool]]:
        """Return the calls left here since the last time."""
        if not self._calls:
            return []
        with self._changed:
            calls, self._calls = self._calls, []
        return calls

    def publish(self, state: LinkState, *, is_open: bool) -> None:
        """Make a state known. *is_open*: work of this epoch is taken, even if the link is not healthy (draining)."""
        with self._changed:
            old, self.state, self._open = self.state, state, is_open
            self._changed.notify_all()
        if state != old:
            _log_change(old, state, self._server)
            if self._on_state is not None:
                attempt("the state callback", partial(self._on_state, state))

    def wait_for(self, condition: Callable[[LinkState], bool], timeout_s: float) -> bool:
        """Wait until *condition* holds for the state; returns whether it does."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self.state), timeout_s)

    def _objection(self, epoch: int | None) -> CacheError | None:
        if epoch is not None and (epoch != self.state.epoch or not self._open):
            return StaleBoot("the session that this request belongs to is over")
        if epoch is None and not self.state.healthy:
            return ServerUnavailable(f"uncached ({self.state.reason}): {self.state.detail}")
        if len(self._calls) >= _QUEUE_CALLS:
            return Busy(f"{_QUEUE_CALLS} requests wait to be sent")
        return None


def _log_change(old: LinkState, new: LinkState, server: str) -> None:
    """Write one line for each change; an unreachable server is one state, whatever each attempt said of it."""
    if new.healthy:
        version = new.welcome.server_version if new.welcome else "?"
        log.info("cache server %s: connected to kvpool %s, mode %s", server, version, new.mode or "none")
    elif new.reason is old.reason and (new.detail == old.detail or new.reason is UncachedReason.UNREACHABLE):
        log.debug("cache server %s: %s", server, new.detail)
    elif new.reason in (UncachedReason.STARTING, UncachedReason.CLOSED):
        log.info("cache server %s: %s", server, new.detail)
    else:
        log.warning("cache server %s: running uncached (%s): %s", server, new.reason, new.detail)
