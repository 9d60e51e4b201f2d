# SPDX-License-Identifier: Apache-2.0
"""Notes when each step of a request begins and ends, in every Python that finds this file on its path.

See ``tests.bench.request_marks``. Marks are lines "seconds who step" in files of the folder KVPOOL_MARKS; the clock is
the machine's, so those of several processes can be laid side by side.
"""

import atexit
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = os.environ.get("KVPOOL_MARKS", "")
_WRITE_S = 1.0
_marks: list[str] = []


class Step(NamedTuple):
    """A method whose calls are noted."""

    who: str
    name: str
    owner: str
    method: str
    of: Callable[..., object] | None = None
    """Returns what the name is followed by the type of."""


STEPS = {
    "kvpool.client.worker": (
        Step("client", "call", "WorkerAdapter", "store"),
        Step("client", "call", "WorkerAdapter", "load"),
    ),
    "kvpool.client.pipe": (Step("client", "send", "Pipe", "_send", lambda pipe, n, *_: pipe._open[n].request),),
    "kvpool.client.call": (Step("client", "reply", "Call", "finish", lambda _, reply, *__: reply),),
    "kvpool.client.ring_part": (
        Step("client", "prepare", "RingPart", "prepare"),
        Step("client", "take", "RingPart", "take"),
    ),
    "kvpool.client.storing": (
        Step("client", "run", "Storing", "run"),
        Step("client", "moved", "Storing", "_moved"),
        Step("client", "end", "Storing", "_end"),
    ),
    "kvpool.client.loading": (
        Step("client", "run", "Loading", "run"),
        Step("client", "moved", "Loading", "_moved"),
        Step("client", "end", "Loading", "_end"),
    ),
    "kvpool.client.ledger": (Step("client", "told", "Ledger", "take"),),
    "kvpool.transfer.lanes": (
        Step("client", "ask", "_Lane", "ask"),
        Step("client", "answer", "_Lane", "answer"),
        Step("client", "launch", "_Lane", "launch"),
    ),
    "kvpool.server.dispatch": (Step("server", "serve", "Dispatcher", "answer"),),
    "kvpool.server.answers": (Step("server", "answer", "Answers", "finish"),),
    "kvpool.server.granted": (
        Step("server", "grant", "Granted", "grant"),
        Step("server", "word", "Granted", "ended"),
    ),
    "kvpool.engine.store": (
        Step("server", "place", "Stores", "prepare"),
        Step("server", "commit", "Stores", "commit"),
    ),
    "kvpool.index.index": (
        Step("server", "room", "Index", "_make_room"),
        Step("server", "evict", "Index", "_evict"),
    ),
    "kvpool.arena.shm": (
        Step("server", "headers begin", "ShmArena", "begin"),
        Step("server", "headers commit", "ShmArena", "commit"),
    ),
    "kvpool.transfer.mover.lanes": (
        Step("mover", "take", "MoverLane", "_take"),
        Step("mover", "landing", "Landing", "end"),
        Step("mover", "answer", "MoverLane", "_answer"),
    ),
}


def note(who: str, name: str) -> None:
    _marks.append(f"{time.monotonic():.7f} {who} {name}\n")


def watch(module: Any, step: Step) -> None:
    """Let a method note when it begins and ends."""
    owner = getattr(module, step.owner)
    method = getattr(owner, step.method)

    @functools.wraps(method)
    def watched(*arguments: Any, **options: Any) -> Any:
        name = step.name if step.of is None else f"{step.name} {type(step.of(*arguments)).__name__}"
        note(step.who, f"{name} <")
        try:
            return method(*arguments, **options)
        finally:
            note(step.who, f"{name} >")

    setattr(owner, step.method, watched)


class Watching(importlib.abc.MetaPathFinder):
    """Loads the modules of STEPS as usual, and watches them from then on."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in STEPS else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            for step in STEPS[fullname]:
                watch(module, step)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def write() -> None:
    taken, _marks[:] = list(_marks), []
    if taken:
        with (Path(FOLDER) / str(os.getpid())).open("a") as file:
            file.writelines(taken)


def write_on() -> None:
    """A process that is killed leaves what it noted until a second before."""
    pause = threading.Event()
    while not pause.wait(_WRITE_S):
        write()


if FOLDER:
    sys.meta_path.insert(0, Watching())
    atexit.register(write)
    threading.Thread(target=write_on, name="marks", daemon=True).start()
