# SPDX-License-Identifier: Apache-2.0
"""What tests/bench/ring_job.py measures: a server, its mover and a client as processes, with kernels and copies of a
few bytes each, whose copies take the time that a link would, and the times at which they began and ended.

``python -m tests.bench.ring_job_rig server --config FILE`` is the server, ``... mover CONTROL PARENT`` its mover.
"""

import os
import secrets
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tests.fakes.blocks import POISON
from tests.fakes.clients import CHUNK_BLOCKS, until
from tests.fakes.ring_device import FakeEngineDevice, FakeMoverDevice, make_ring, map_file, path_of
from tests.fakes.ring_engine import RingEngine
from tests.fakes.server_process import ServerProcess

from kvpool.client.jobs import LoadJob, StoreJob
from kvpool.model.identity import Mode
from kvpool.transfer.mover.messages import Direction, Ring
from kvpool.transfer.planes import Layout, Plane

MODULE = "tests.bench.ring_job_rig"
ROOT = Path(__file__).resolve().parents[2]
TURNS, SLOTS = 64, 4
"""Slots' contents of one job: what 2 GiB are in slots of 32 MiB."""

BLOCKS, BLOCK_BYTES = 16, 64
"""Of a chunk; so many blocks has a chunk of 256 tokens."""

CHUNK_BYTES = BLOCKS * BLOCK_BYTES
COPY_S = 0.0003
"""Of a slot: half of what 32 MiB take on a link of 55 GB/s."""

MOVES = 1 << 15
PATIENCE_S = 60.0
MIB = 1 << 20


class QuickEngineDevice(FakeEngineDevice):
    """A kernel is one indexed copy, made when somebody waits for it."""

    def _run(self, direction, slot, job, turn):
        pages, start = self.storages[0].reshape(-1, BLOCK_BYTES), self.ring.offset(direction, slot)
        ids = job.ids[turn.chunks[0] : turn.chunks[-1] + 1].ravel()
        held = self._memory[start : start + turn.length].reshape(-1, BLOCK_BYTES)
        if direction is Direction.STORE:
            np.take(pages, ids, axis=0, out=held, mode="clip")
        else:
            pages[ids] = held


class LinkMoverDevice(FakeMoverDevice):
    """Each direction has a link that is busy for ``COPY_S`` with a slot's bytes, one slot after the other."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self._marks = Marks(path_of(ring).with_suffix(".marks"))
        self._count, self._free_s = dict.fromkeys(Direction, 0), dict.fromkeys(Direction, 0.0)
        self._ends_s: dict[tuple[Direction, int], float] = {}
        self._pause = threading.Event()

    def mark(self, direction, slot):
        begins_s = max(time.monotonic(), self._free_s[direction])
        ends_s = self._free_s[direction] = self._ends_s[direction, slot] = begins_s + COPY_S
        self._marks.times(direction)[self._count[direction] % MOVES] = begins_s, ends_s
        self._count[direction] += 1

    def wait(self, direction, slot):
        while (left_s := self._ends_s[direction, slot] - time.monotonic()) > 0:
            self._pause.wait(left_s)


class Marks:
    """Begin and end of each copy of a mover, in their order, in a file."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(2 * MOVES * 2 * 8))
        self._all = map_file(path).view(np.float64).reshape(2, MOVES, 2)

    def times(self, direction: Direction) -> np.ndarray:
        """Shape (MOVES, 2), monotonic seconds."""
        return self._all[int(direction is Direction.LOAD)]


class Client(RingEngine):
    """An engine whose ends are told with their time. Its first half is stored from, its second loaded into."""

    def __init__(self, address: str, chunks: int) -> None:
        blocks = 2 * chunks * CHUNK_BLOCKS
        super().__init__(address, Mode.RING, blocks=blocks, block_bytes=CHUNK_BYTES // CHUNK_BLOCKS, transfer_s=30.0)
        self.chunks = chunks
        self.pages = self.blocks.memory.reshape(-1, BLOCK_BYTES)
        plane = Plane(name="l", storage=0, offset=0, stride=BLOCK_BYTES, block_bytes=BLOCK_BYTES, packing="p")
        layout = Layout(planes=(plane,), blocks=len(self.pages), block_tokens=BLOCKS)
        ring = make_ring(self.folder / "quick", SLOTS, chunks // TURNS * CHUNK_BYTES)
        self.marks = Marks(path_of(ring).with_suffix(".marks"))
        self.offer.device = QuickEngineDevice(ring, layout, [self.pages.reshape(-1)], BLOCKS)
        self.offer._layouts = [layout]
        self._moves = dict.fromkeys(Direction, 0)
        self._ends: dict[str, float] = {}
        self._told = threading.Condition()
        ledger = self.worker._ledger
        for name in ("end_store", "end_load"):
            setattr(ledger, name, self._telling(getattr(ledger, name)))
        order = np.random.default_rng(7)
        self.sources = order.permutation(len(self.pages) // 2).reshape(chunks, BLOCKS)
        self.targets = len(self.pages) // 2 + order.permutation(len(self.pages) // 2).reshape(chunks, BLOCKS)

    def _telling(self, end):
        def told(request_id, *more):
            end(request_id, *more)
            with self._told:
                self._ends[request_id] = time.monotonic()
                self._told.notify_all()

        return told

    def begin(self, name: str, keys: bytes, answer=None) -> None:
        """Ask for a store, or with a lookup's *answer* for a load."""
        place = {"request_id": name, "group": 0, "shard": 0, "first": 0}
        if answer is None:
            job = StoreJob(**place, parent=b"", digests=keys, block_ids=self.sources)
            job.ready.set()
            self.worker.store(job)
        else:
            self.worker.load(LoadJob(**place, lookup_id=answer.lookup_id, end=self.chunks, block_ids=self.targets))

    def wait(self, name: str) -> float:
        """Wait for an end; returns when it was."""
        with self._told:
            assert self._told.wait_for(lambda: name in self._ends, PATIENCE_S), self.worker.counters()
        ended = self.worker.poll()
        assert not any(ended.loaded.values()), self.worker.counters()
        return self._ends[name]

    def moves(self, way: Direction, jobs: int = 1) -> np.ndarray:
        """Return begin and end of the moves of the jobs since the last call, shape (jobs, TURNS, 2)."""
        first = self._moves[way]
        self._moves[way] += jobs * TURNS
        return self.marks.times(way)[np.arange(first, self._moves[way]) % MOVES].reshape(jobs, TURNS, 2)

    def checked(self) -> int:
        """Store new bytes, load them over poison and compare; returns how many were compared."""
        half = len(self.pages) // 2
        self.pages[:half] = np.random.default_rng().integers(0, 256, (half, BLOCK_BYTES), dtype=np.uint8)
        self.pages[half:] = POISON
        keys, name = new_keys(self.chunks)
        self.begin(name, keys)
        self.wait(name)
        self.begin(f"l{name}", keys, self.found(f"l{name}", keys))
        self.wait(f"l{name}")
        for way in Direction:
            self.moves(way)
        assert (self.pages[self.targets] == self.pages[self.sources]).all(), "WRONG BYTES: no number counts"
        assert not [n for n in self.worker.counters() if "lost" in n and self.worker.counters()[n]]
        return half * BLOCK_BYTES

    def found(self, name: str, keys: bytes):
        """Look keys up; all must be there."""
        answer = self.lookup(keys, name)
        assert answer.chunks == self.chunks
        return answer


def new_keys(chunks: int) -> tuple[bytes, str]:
    """Return keys that nobody stored yet and the name of their request."""
    return secrets.token_bytes(32 * chunks), secrets.token_hex(8)


@contextmanager
def running(code: Path, chunks: int, **sections):
    """Run server, mover and client of the kvpool in *code*; yields the client, and the process ids of the others."""
    with TemporaryDirectory(prefix="kvpool-bench-") as name:
        sections = {"l1": {"verify_loads": 0.0}, "leases": {"heartbeat_s": 1.0, "client_silent_s": 5.0}} | sections
        server = ServerProcess(Path(name), size_bytes=32 * MIB, code=code, program=("-m", MODULE), **sections)
        with server, Client(server.address, chunks) as client:
            client.healthy(PATIENCE_S)
            pid = server._process.pid
            until(lambda: len(children(pid)) == 1, PATIENCE_S)
            yield client, {"server": pid, "mover": children(pid)[0]}


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def processor_s(pid: int) -> float:
    """Seconds of the processor that all threads of a process had."""
    return sum(int((t / "schedstat").read_text().split()[0]) for t in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def main(role: str, *arguments: str) -> int:
    if role == "mover":
        from kvpool.transfer.mover.process import MoverProcess, die_with_parent

        die_with_parent(int(arguments[1]))
        MoverProcess(socket.socket(fileno=int(arguments[0])), LinkMoverDevice).run()
    from kvpool.config import decode_server
    from kvpool.server.compose import run_server

    command = (sys.executable, "-m", MODULE, "mover")
    return run_server(decode_server(Path(arguments[-1]).read_bytes(), os.environ), command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
