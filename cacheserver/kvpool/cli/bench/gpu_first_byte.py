# SPDX-License-Identifier: Apache-2.0
"""How long a request waits for its first move: from the client's call, and from when its question leaves the client.

The second one begins as the client hands the question to its link: before the server has it, by a wake-up of the link's
thread, a message of ZeroMQ and a wake-up of the server. A ping costs the same, and an answer.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from kvpool.cli.bench.gpu_cells import checked, filled
from kvpool.cli.bench.gpu_engine import GpuEngine, Request
from kvpool.cli.bench.gpu_rig import Rig
from kvpool.cli.bench.results import Cell, spread
from kvpool.cli.errors import Failure
from kvpool.client.call import Call
from kvpool.connector.ring import RingOffer
from kvpool.transfer.plan import Turn
from kvpool.wire.messages import Ping, PrepareRetrieve, PrepareStore

__all__ = ["first_byte"]

_ROUNDS: Final = 12


class _Waits(Struct):
    """Milliseconds to the first move of each request."""

    called: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)


class _Marks:
    """When the last question left, and when the last job's first move began."""

    def __init__(self, engine: GpuEngine) -> None:
        assert engine.ring is not None
        assert isinstance(engine.ring.offer, RingOffer)
        self.asked_s = self.moved_s = 0.0
        device, link = engine.ring.offer.device, engine.worker_link
        self._turns, self._submit = device.turns, link.submit
        device.turns = self._move  # type: ignore[method-assign]
        link.submit = self._ask  # type: ignore[method-assign]

    def of(self, job: Callable[[], None], waits: _Waits) -> None:
        """Run one job to its end and note how long it waited.

        Raises:
            Failure: no question was seen to leave, or no move to begin.
        """
        called_s = time.monotonic()
        job()
        if not called_s <= self.asked_s <= self.moved_s:
            raise Failure("the bench did not see a request's question or its first move; this is a defect of the bench")
        waits.called.append(1e3 * (self.moved_s - called_s))
        waits.asked.append(1e3 * (self.moved_s - self.asked_s))

    def _move(self, group: int, chunks: Sequence[int]) -> Iterator[Turn]:
        self.moved_s = time.monotonic()
        return self._turns(group, chunks)

    def _ask(self, request: Any, *arguments: Any, **options: Any) -> Call[Any]:
        if isinstance(request, PrepareStore | PrepareRetrieve):
            self.asked_s = time.monotonic()
        return self._submit(request, *arguments, **options)


def first_byte(rig: Rig, run: int) -> list[Cell]:
    """To the moment when the mover is about to be asked for the first move, one request at a time."""
    stores, loads, pings = _Waits(), _Waits(), []
    with filled(rig, run) as engine:
        known, compared = checked(engine)
        marks = _Marks(engine)
        for _ in range(_ROUNDS):
            fresh = Request(known.chunks)
            marks.of(partial(_stored, engine, fresh), stores)
            answer = engine.found(fresh)
            marks.of(partial(_loaded, engine, fresh, answer), loads)
            began_s = time.monotonic()
            engine.worker_link.call(Ping())
            pings.append(1e3 * (time.monotonic() - began_s))
        compared += checked(engine)[1]
    tokens = known.chunks * rig.chunk_tokens
    cells: list[Cell] = []
    for way, waits in (("store", stores), ("load", loads)):
        what = f"from the call of a {way} of {tokens} tokens to its first move"
        cells.append(_cell(f"first-byte-{way}", what, waits.called))
        what = f"from when the question of a {way} of {tokens} tokens leaves the client to its first move"
        cells.append(_cell(f"first-byte-asked-{way}", what, waits.asked))
    cells.append(_cell("first-byte-ping", "a ping of the same client, there and back", pings))
    return [replace(cell, compared_bytes=compared) for cell in cells]


def _stored(engine: GpuEngine, request: Request) -> None:
    engine.store(request)
    engine.ended()


def _loaded(engine: GpuEngine, request: Request, answer: Any) -> None:
    engine.load(request, answer)
    engine.ended()


def _cell(name: str, what: str, values: Sequence[float]) -> Cell:
    median = round(statistics.median(values), 4)
    return Cell(name=name, what=what, unit="ms", value=median, spread=spread(values))
