# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201
"""What the ring moves, and what that costs the engine, beside the copy ceiling of the same run.

    PYTHONPATH=cacheserver:. python tests/gpu/bench_ring.py [--runs 32768,4096] [--slots 4] [--slot-mib 32] [--json F]

One job is 2 GiB (16k tokens at 128 KiB a token) in 64 planes, 16 blocks to a chunk, random blocks of a pool of twice
as many; its end is waited for. All bytes are compared before and after the timing, targets poisoned; a case whose bytes
differ has no number. Products are 8192-cubed bf16, measured alone before and after each busy case.
"""

import argparse
import json
import mmap
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.fakes.waiting_ring import WaitingRing

from kvpool.model.slots import PLACEMENT, Disposition
from kvpool.transfer.cuda import Context
from kvpool.transfer.kernels.groups import PagedGroup, prepare
from kvpool.transfer.kernels.paged import CudaEngineDevice
from kvpool.transfer.lanes import LoadLane, StoreLane
from kvpool.transfer.mover.messages import Direction, Move, Moved, Start, ToClient
from kvpool.transfer.mover.supervision import MOVER_COMMAND, Mover, MoverState
from kvpool.transfer.pipe import Frames, frame
from kvpool.transfer.plan import slot_ids
from kvpool.transfer.planes import Layout, Plane
from kvpool.transfer.ring_ports import RingJob

GIB = 1 << 30
PLANES, PER_CHUNK = 64, 16
JOB_BYTES = 2 * GIB
SECRET = os.urandom(16)
TICK = os.sysconf("SC_CLK_TCK")


class Products:
    """An engine's matrix products, in a thread; ``rate`` counts those of a time span."""

    def __init__(self) -> None:
        self._on, self._stop = threading.Event(), False
        self._done: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def switch(self, *, on: bool) -> None:
        (self._on.set if on else self._on.clear)()

    def rate(self, began_s: float, ended_s: float) -> float:
        """TFLOP/s between two times."""
        inside = [(t, n) for t, n in self._done if began_s <= t <= ended_s]
        if len(inside) < 2:
            return 0.0
        return sum(n for _, n in inside[1:]) * 2 * 8192**3 / (inside[-1][0] - inside[0][0]) / 1e12

    def _run(self) -> None:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        b, c = torch.randn_like(a), torch.empty_like(a)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not self._stop:
                self._on.wait()
                for _ in range(10):
                    torch.matmul(a, b, out=c)
                stream.synchronize()
                self._done.append((time.monotonic(), 10))


class Arena:
    """Shared memory in segments of 1 GiB, touched, mapped and registered here, too."""

    def __init__(self, folder: Path, context: Context, segments: int) -> None:
        self.files = [folder / f"segment.{n}" for n in range(segments)]
        self.maps = []
        for path in self.files:
            with path.open("wb+") as file:
                os.posix_fallocate(file.fileno(), 0, GIB)
                self.maps.append(np.frombuffer(mmap.mmap(file.fileno(), GIB), dtype=np.uint8))
        with ThreadPoolExecutor(8) as pool:
            list(
                pool.map(
                    lambda part: part.fill(1), [m[k : k + GIB // 8] for m in self.maps for k in range(0, GIB, GIB // 8)]
                )
            )
        for view in self.maps:
            context.register(view.ctypes.data, GIB)

    def rows(self, first: int, chunk: int) -> np.ndarray:
        """Placements of one job's chunks, from segment *first* on, and a last one that is never moved.

        The grant of a store ends when all of it came, and each job is measured many times.
        """
        per = GIB // chunk
        rows = np.zeros(2 * per + 1, dtype=PLACEMENT)
        number = np.arange(len(rows)) % (2 * per)
        rows["memory"], rows["offset"] = first + number // per, number % per * chunk
        rows["length"], rows["disposition"] = chunk, Disposition.WRITE
        return rows

    def on_device(self, first: int) -> torch.Tensor:
        """A job's bytes."""
        return torch.cat([torch.from_numpy(self.maps[first + n]).cuda() for n in (0, 1)])

    def fill(self, first: int, data: torch.Tensor | None) -> None:
        for n in (0, 1):
            target = torch.from_numpy(self.maps[first + n])
            target.fill_(0xEE) if data is None else target.copy_(data[n * GIB : (n + 1) * GIB])


class Cache:
    """A paged cache and one job's blocks in it."""

    def __init__(self, run: int, seed: int) -> None:
        self.run, self.chunk = run, PLANES * PER_CHUNK * run
        self.chunks = JOB_BYTES // self.chunk
        self.pages = 2 * self.chunks * PER_CHUNK
        self.pool = torch.randint(0, 256, (PLANES, self.pages, run), dtype=torch.uint8, device="cuda")
        ids = np.random.default_rng(seed).permutation(self.pages)[: self.chunks * PER_CHUNK]
        self.ids = slot_ids(ids.reshape(self.chunks, PER_CHUNK), self.pages)
        self._index = torch.from_numpy(self.ids.ravel()).cuda()

    def group(self) -> PagedGroup:
        planes = tuple(
            Plane(
                name=str(n),
                storage=0,
                offset=n * self.pages * self.run,
                stride=self.run,
                block_bytes=self.run,
                packing="p",
            )
            for n in range(PLANES)
        )
        layout = Layout(planes=planes, blocks=self.pages, block_tokens=16)
        return PagedGroup(layout, [self.pool.data_ptr()])

    def holds(self, data: torch.Tensor) -> bool:
        """Whether the job's blocks have exactly these bytes."""
        chunks = data.view(self.chunks, PLANES, PER_CHUNK, self.run)
        return all(
            torch.equal(self.pool[p][self._index].view(self.chunks, PER_CHUNK, self.run), chunks[:, p])
            for p in range(PLANES)
        )


class Reel:
    """In the place of a mover's connection: answers at once, in this process."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._frames: Frames[ToClient] = Frames(ToClient)

    def send(self, message: Move) -> None:
        frame(message)
        self._answers.put(frame(Moved(turn=message.turn)))

    def receive(self, ends_s: float) -> ToClient:
        del ends_s
        while (message := self._frames.next()) is None:
            self._frames.feed(self._answers.get())
        return message


class Timed:
    """A device whose waits are timed."""

    def __init__(self, device: CudaEngineDevice) -> None:
        self._device = device
        self.waited_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def wait(self, direction: Direction, slot: int) -> None:
        began = time.thread_time()
        self._device.wait(direction, slot)
        self.waited_s += time.thread_time() - began


def interpreter_us(device: CudaEngineDevice, lane: type[StoreLane] | type[LoadLane], job: RingJob) -> float:
    """CPU time of a lane's two threads for each slot, without waiting for kernels and without sockets.

    An upper bound of what the lane takes of the interpreter's lock: everything that Python does, the launch, and the
    queue between the threads.
    """
    timed = Timed(device)
    made = lane(timed, Reel(), print)  # type: ignore[arg-type]
    thread = made._lane._thread
    clock = time.pthread_getcpuclockid(thread.ident)  # type: ignore[arg-type]
    device.use()
    made.begin(job, time.monotonic() + 60)
    job.finish()
    job._cancelled = False
    timed.waited_s = 0.0
    began = time.thread_time(), time.clock_gettime(clock)
    made.begin(job, time.monotonic() + 60)
    job.finish()
    spent = time.thread_time() - began[0] + time.clock_gettime(clock) - began[1] - timed.waited_s
    slots = len(list(device.turns(job.group, job.chunks)))
    made.close()
    return 1e6 * spent / slots


class Bench:
    """One run of everything."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        torch.zeros(1, device="cuda")
        self.context = Context.current()
        self.arena = Arena(folder, self.context, 4)
        self.products = Products()
        self.rows: list[dict[str, Any]] = []
        self.mover: Mover | None = None

    def ceiling(self) -> dict[str, float]:
        """GB/s of plain copies of 1 GiB between the device and the registered arena, out, in, and both at once."""
        context = self.context
        device = [context.allocate(GIB) for _ in range(2)]
        streams = [context.stream(urgent=False) for _ in range(2)]
        out = lambda: context.copy_out(self.arena.maps[0].ctypes.data, device[0], GIB, streams[0])  # noqa: E731
        into = lambda: context.copy_in(device[1], self.arena.maps[2].ctypes.data, GIB, streams[1])  # noqa: E731
        found = {}
        for name, calls in (("store", [out]), ("load", [into]), ("both", [out, into])):
            for timed in (False, True):
                began = time.monotonic()
                for _ in range(24 if timed else 2):
                    for call in calls:
                        call()
                for stream in streams:
                    context.wait_stream(stream)
            found[name] = 24 * len(calls) * GIB / (time.monotonic() - began) / 1e9
        for address in device:
            context.free(address)
        return found

    def case(self, run: int) -> None:
        """All cases of one run size, idle and busy."""
        caches = {Direction.STORE: Cache(run, 1), Direction.LOAD: Cache(run, 2)}
        groups = [cache.group() for cache in caches.values()]
        free = self.context.free_bytes()
        made = prepare(self.context, groups)
        device = CudaEngineDevice(
            self.context, made, self.options.slots, self.options.slot_mib << 20, programs=self.options.programs
        )
        device.fit([PER_CHUNK] * len(groups))
        ring_bytes = free - self.context.free_bytes()
        mover, ring = self._start(device)
        jobs = {}
        for number, (direction, cache) in enumerate(caches.items()):
            name = direction.value.encode()
            mover.grant(name, direction, self.arena.rows(2 * number, cache.chunk))
            jobs[direction] = RingJob(group=number, grant=name, ids=cache.ids, chunks=range(cache.chunks))
        mover.turn(time.monotonic())
        moves = {Direction.STORE: lambda: ring.store(jobs[Direction.STORE], time.monotonic() + 60)}

        def load() -> frozenset[int]:
            jobs[Direction.LOAD]._cancelled = False
            return ring.load(jobs[Direction.LOAD], time.monotonic() + 60)

        moves[Direction.LOAD] = load
        correct = self._compare(caches, moves)
        for busy in (False, True):
            if busy and self.options.no_busy:
                continue
            for name, kinds in (("store", [Direction.STORE]), ("load", [Direction.LOAD]), ("both", [*Direction])):
                row = self._measure([moves[k] for k in kinds], busy=busy)
                slots = JOB_BYTES / (self.options.slot_mib << 20)
                self.rows.append({"run": run, "what": name, "busy": busy, "correct": correct, **row, "slots": slots})
                print(self.rows[-1], flush=True)
        for direction, lane in ((Direction.STORE, StoreLane), (Direction.LOAD, LoadLane)):
            job = jobs[direction]
            job._cancelled = False
            print(f"interpreter, {direction}: at most {interpreter_us(device, lane, job):.1f} us per slot", flush=True)
        correct = self._compare(caches, moves)
        for row in self.rows:
            if row["run"] == run:
                row["correct"] = row["correct"] and correct
                row["ring_mib"] = round(ring_bytes / (1 << 20))
        ring.close()
        mover.kill("done")
        while mover.state is not MoverState.REAPED:
            mover.turn(time.monotonic())
            threading.Event().wait(0.01)
        device.free()
        del caches
        torch.cuda.empty_cache()

    def _start(self, device: CudaEngineDevice) -> tuple[Mover, WaitingRing]:
        path = self.folder / f"mover.{len(self.rows)}"
        start = Start(ring=device.ring, secret=SECRET, listen=f"unix:{path}")
        began = time.monotonic()
        mover = self.mover = Mover(MOVER_COMMAND, start, os.getpid(), began)
        for number, file in enumerate(self.arena.files):
            mover.give_segment(number, os.open(file, os.O_RDWR), GIB)
        while mover.state is MoverState.STARTING:
            mover.turn(time.monotonic())
            threading.Event().wait(0.002)
        print(f"mover ready after {time.monotonic() - began:.2f} s {mover.reason}", flush=True)
        threading.Event().wait(0.5)
        return mover, WaitingRing(device, mover.address, SECRET, time.monotonic() + 5)

    def _compare(self, caches: dict[Direction, Cache], moves: dict[Direction, Callable[[], frozenset[int]]]) -> bool:
        """Move once each way into poisoned targets and compare all bytes."""
        self.arena.fill(0, None)
        lost = moves[Direction.STORE]()
        right = not lost and caches[Direction.STORE].holds(self.arena.on_device(0))
        data = torch.randint(0, 256, (JOB_BYTES,), dtype=torch.uint8, device="cuda")
        self.arena.fill(2, data)
        caches[Direction.LOAD].pool.fill_(0xEE)
        torch.cuda.synchronize()
        lost = moves[Direction.LOAD]()
        return right and not lost and caches[Direction.LOAD].holds(data)

    def _measure(self, moves: Sequence[Callable[[], frozenset[int]]], *, busy: bool) -> dict[str, Any]:
        seconds = self.options.busy_seconds if busy else self.options.seconds
        alone = []
        self.products.switch(on=busy)
        if busy:
            alone.append(self._alone())
        before = self._cpu(), time.monotonic()
        counts = [0] * len(moves)
        ends = before[1] + seconds
        lost: set[int] = set()

        def work(n: int) -> None:
            self.context.use()
            while time.monotonic() < ends:
                lost.update(moves[n]())
                counts[n] += 1
            self.callers[threading.get_ident()] = time.thread_time()

        self.callers: dict[int, float] = {}
        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(moves))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent, after = time.monotonic() - before[1], self._cpu()
        row: dict[str, Any] = {"gb_s": round(sum(counts) * JOB_BYTES / spent / 1e9, 2), "lost": len(lost)}
        slots = sum(counts) * JOB_BYTES / (self.options.slot_mib << 20)
        lanes = after["lanes"] - before[0]["lanes"] + sum(self.callers.values())
        row["lane_us_per_slot"] = round(1e6 * lanes / slots, 1)
        row["mover_us_per_slot"] = round(1e6 * (after["mover"] - before[0]["mover"]) / slots, 1)
        if busy:
            with_lane = self.products.rate(before[1] + 0.3, before[1] + spent)
            alone.append(self._alone())
            row["products_alone"], row["products"] = round(statistics.mean(alone), 1), round(with_lane, 1)
            row["loss_percent"] = round(100 * (1 - with_lane / statistics.mean(alone)), 2)
        self.products.switch(on=False)
        return row

    def _alone(self) -> float:
        threading.Event().wait(0.4)
        began = time.monotonic()
        threading.Event().wait(1.2)
        return self.products.rate(began, time.monotonic())

    def _cpu(self) -> dict[str, float]:
        """CPU seconds so far of the ring's waiting threads, and of the mover."""
        lanes = sum(
            time.clock_gettime(time.pthread_getcpuclockid(t.ident))  # type: ignore[arg-type]
            for t in threading.enumerate()
            if t.name.startswith("kvpool-ring")
        )
        assert self.mover is not None
        fields = Path(f"/proc/{self.mover.pid}/stat").read_text().rpartition(")")[2].split()
        return {"lanes": lanes, "mover": (int(fields[11]) + int(fields[12])) / TICK}


def table(rows: list[dict[str, Any]], ceiling: dict[str, float]) -> str:
    shown = ", ".join(f"{name} {value:.1f}" for name, value in ceiling.items())
    lines = [
        f"Copy ceiling of this run, GB/s: {shown}",
        "",
        "| run | engine | way | GB/s | of the ceiling | products lose | engine CPU per slot | mover CPU per slot |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = f"{row['gb_s'] / ceiling[row['what']]:.3f}" if row["correct"] and not row["lost"] else "bytes differ"
        loss = f"{row['loss_percent']} %" if row["busy"] else ""
        lines.append(
            f"| {row['run'] / 1024:g} KiB | {'busy' if row['busy'] else 'idle'} | {row['what']} | {row['gb_s']}"
            f" | {share}"
            f" | {loss} | {row['lane_us_per_slot']} us | {row['mover_us_per_slot']} us |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the ring on a GPU.")
    parser.add_argument("--runs", default="32768,8192,4096,2048")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--slot-mib", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--busy-seconds", type=float, default=2.5)
    parser.add_argument("--programs", type=int, default=1056)
    parser.add_argument("--no-busy", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        bench = Bench(options, Path(folder))
        ceiling = bench.ceiling()
        for run in options.runs.split(","):
            bench.case(int(run))
    print(f"\n{torch.cuda.get_device_name()}, {options.slots} slots of {options.slot_mib} MiB\n")
    print(table(bench.rows, ceiling), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"ceiling": ceiling, "rows": bench.rows, "options": vars(options)}, default=str)
        )
    sys.stdout.flush()
    os._exit(0 if all(r["correct"] and not r["lost"] for r in bench.rows) else 1)


if __name__ == "__main__":
    main()
