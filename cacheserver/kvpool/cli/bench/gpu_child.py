# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own: ``python -m kvpool.cli.bench.gpu_child``.

Its standard input has a ``Setup`` and then one ``Order`` a line, its standard output one ``Told`` a line. It ends with
its input.
"""

import os
import sys
from contextlib import ExitStack
from typing import BinaryIO, Final

import msgspec

from kvpool.cli.bench.gpu_ceiling import Link
from kvpool.cli.bench.gpu_cells import Flow, checked, engine_for
from kvpool.cli.bench.gpu_devices import Order, Setup, Told, What
from kvpool.cli.bench.gpu_engine import GpuEngine, Request, use_device
from kvpool.cli.bench.gpu_rig import WAYS, Rig, WrongBytesError
from kvpool.cli.errors import Failure
from kvpool.transfer.cuda import CudaError

__all__ = ["main", "serve"]

_OUT: Final = 1
_ERRORS: Final = 2


class _Worker:
    """Does what it is told."""

    def __init__(self, rig: Rig, link: Link, stack: ExitStack) -> None:
        self._rig, self._link, self._stack = rig, link, stack
        self._known = Request(0)
        self._engine: GpuEngine | None = None

    def does(self, order: Order) -> Told:
        """Do it.

        Raises:
            Failure: a move failed, or bytes are wrong.
            CudaError: a copy failed.
        """
        if order.what is What.COPY:
            copied, began_s, ended_s = self._link.copy(order.way)
            return Told(moved_bytes=copied, began_s=began_s, ended_s=ended_s)
        if order.what is What.OPEN:
            self._stack.close()
            self._engine = None  # its cache's memory, before the next one takes its own
            self._engine = self._stack.enter_context(engine_for(self._rig, order.run))
            return Told()
        assert self._engine is not None
        if order.what is What.CHECK:
            self._known, compared = checked(self._engine)
            return Told(compared_bytes=compared)
        moved = Flow(self._rig, self._engine, self._known).run(WAYS[order.way], self._rig.seconds)
        return Told(moved_bytes=moved.bytes_moved, began_s=moved.began_s, ended_s=moved.ended_s)


def serve(orders: BinaryIO, answers: BinaryIO) -> int:
    """Be an engine until *orders* end."""

    def tell(told: Told) -> None:
        answers.write(msgspec.json.encode(told) + b"\n")
        answers.flush()

    setup = msgspec.json.decode(orders.readline(), type=Setup)
    try:
        use_device(setup.device)
        with Link(setup.rig.memory) as link, ExitStack() as stack:
            worker = _Worker(setup.rig, link, stack)
            tell(Told())
            for line in iter(orders.readline, b""):
                tell(worker.does(msgspec.json.decode(line, type=Order)))
    except (Failure, CudaError) as e:
        tell(Told(problem=str(e), wrong=isinstance(e, WrongBytesError)))
        return 1
    return 0


def main() -> int:
    """Serve; what anything else in this process prints goes to standard error."""
    answers = os.fdopen(os.dup(_OUT), "wb")
    os.dup2(_ERRORS, _OUT)
    with answers:
        return serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    sys.exit(main())
