# SPDX-License-Identifier: Apache-2.0
"""Where the engine's stream is: events of its device, made in the engine's thread and awaited in others."""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from kvpool.transfer.cuda import Context

__all__ = ["DeviceMoment", "Moments"]

_EVENTS: Final = 64


class DeviceMoment:
    """A ``Moment`` of the client. Its event goes back to the others when nobody has the moment any more."""

    __slots__ = ("__weakref__", "_context", "event")

    def __init__(self, context: Context, event: int) -> None:
        self._context, self.event = context, event

    def wait(self) -> None:
        """Wait until the device is there; in a thread of our own."""
        self._context.use()
        self._context.wait_event(self.event)


class Moments:
    """The moments of one device, and its context. The engine's thread makes and calls it."""

    def __init__(self, number: int) -> None:
        """Make events on device *number*.

        Raises:
            CudaError: there is no driver.
        """
        self._torch = torch.device("cuda", number)
        with torch.cuda.device(self._torch):
            torch.cuda.current_stream().synchronize()  # makes torch's context current in this thread
            self.context = Context.current()
            self._events = deque(self.context.event() for _ in range(_EVENTS))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the device current in this thread, for torch and Triton, too, and afterwards what was current before."""
        with torch.cuda.device(self._torch), self.context.entered():
            yield

    def now(self) -> DeviceMoment:
        """Return where the engine's current stream is now."""
        with self.context.entered():
            event = self._events.popleft() if self._events else self.context.event()
            self.context.record(event, torch.cuda.current_stream(self._torch).cuda_stream)
        made = DeviceMoment(self.context, event)
        weakref.finalize(made, self._events.append, event)
        return made
