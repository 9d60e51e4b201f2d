# SPDX-License-Identifier: Apache-2.0
"""Mode mapped with a mover process that maps the engine's "device memory": real descriptors, bytes and deaths."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.mapped_device import PAGE, FileCache
from tests.fakes.mover_rig import PATIENCE_S, SECRET, MoverRig
from tests.fakes.ring_device import UUID

from kvpool.model.checksum import ChecksumKind, checksum
from kvpool.model.slots import CHECK
from kvpool.transfer import reference
from kvpool.transfer.cuda import CudaError
from kvpool.transfer.lanes import RingRetiredError
from kvpool.transfer.mapped import MappedJob, MappedMover
from kvpool.transfer.mover.messages import (
    CacheGroup,
    CachePlane,
    Direction,
    Done,
    Export,
    Exported,
    Job,
    Join,
    Piece,
    Ring,
    ToClient,
)
from kvpool.transfer.mover.supervision import MoverState
from kvpool.transfer.pipe import Pipe
from kvpool.transfer.plan import slot_ids
from kvpool.transfer.planes import Layout, Plane
from kvpool.transfer.ring import join_mover

BLOCKS, PER_CHUNK = 64, 4
SIZES = (96, 32, 160)
CHUNK = sum(SIZES) * PER_CHUNK


def planes(gap: int = 32) -> Layout:
    """Three planes over two storages; without a gap their blocks follow each other."""
    made, ends = [], [0, 0]
    for number, size in enumerate(SIZES):
        at = ends[number % 2]
        made.append(
            Plane(name=str(number), storage=number % 2, offset=at, stride=size + gap, block_bytes=size, packing="p")
        )
        ends[number % 2] += BLOCKS * (size + gap)
    return Layout(planes=tuple(made), blocks=BLOCKS, block_tokens=16)


def staging(slot_bytes: int = 2 * CHUNK, slots: int = 3) -> Ring:
    return Ring(device=UUID, handle=b"", slot_bytes=slot_bytes, slots=slots, generation=1)


def join(rig: MoverRig, cache: FileCache) -> MappedMover:
    joins = [Join(secret=SECRET, direction=d, generation=1) for d in Direction]
    return MappedMover(cache, rig.mover.address, joins, soon(), lambda: None)


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def some_ids(chunks: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).permutation(BLOCKS)[: chunks * PER_CHUNK].reshape(chunks, PER_CHUNK)


def job(ids: np.ndarray, grant: bytes = b"g", **more: object) -> MappedJob:
    null = more.pop("null_block", None)
    skip = more.pop("skip", None)
    checked = slot_ids(ids, BLOCKS, null_block=null, skip=skip)  # type: ignore[arg-type]
    return MappedJob(group=0, grant=grant, ids=checked, chunks=range(len(ids)), **more)  # type: ignore[arg-type]


def run(mover: MappedMover, direction: Direction, job: MappedJob, ends_s: float) -> frozenset[int]:
    """Do a job whole."""
    mover.begin(direction, job, ends_s)
    job.finish()
    if job.lost is None:
        raise RingRetiredError(mover.retired)
    return job.lost


def store(mover: MappedMover, job: MappedJob, ends_s: float) -> frozenset[int]:
    return run(mover, Direction.STORE, job, ends_s)


def load(mover: MappedMover, job: MappedJob, ends_s: float) -> frozenset[int]:
    return run(mover, Direction.LOAD, job, ends_s)


def places(chunks: int, gap: int = 0) -> list[tuple[int, int]]:
    return [(0, n * (CHUNK + gap)) for n in range(chunks)]


def expected(cache: FileCache, ids: np.ndarray) -> bytes:
    out = np.zeros(CHUNK, dtype=np.uint8)
    reference.gather_blocks(cache.storages, cache.layouts[0][0], ids, out, -1)
    return out.tobytes()


@pytest.mark.behaviour("R018", "R029")
@pytest.mark.parametrize("slot_bytes", [2 * CHUNK, CHUNK, 700, 200])
@pytest.mark.parametrize("virtual", [False, True], ids=["handles", "descriptors"])
@pytest.mark.parametrize("way", ["kernel", "copies"])
def test_what_is_stored_comes_back_and_nothing_else_is_touched(
    tmp_path: Path, slot_bytes: int, virtual: bool, way: str
) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)], virtual=virtual)
    cache.let(way)
    with MoverRig(tmp_path, staging(slot_bytes)) as rig:
        mover = join(rig.ready(), cache)
        stored = job(some_ids(9))
        rig.grant(b"g", Direction.STORE, places(9, gap=64), CHUNK)

        assert store(mover, stored, soon()) == frozenset()

        for number, (region, offset) in enumerate(places(9, gap=64)):
            assert rig.bytes_at(region, offset, CHUNK) == expected(cache, stored.ids[number])
            assert rig.bytes_at(region, offset + CHUNK, 64) == b"\xdd" * 64
        before = [storage.copy() for storage in cache.storages]
        overwrite(cache, stored.ids)
        rig.grant(b"l", Direction.LOAD, places(9, gap=64), CHUNK)

        assert load(mover, job(some_ids(9), b"l"), soon()) == frozenset()

        for storage, former in zip(cache.storages, before, strict=True):
            assert (storage == former).all()
        assert way in cache.ways
        assert set(cache.ways) <= {way, "copies"}, "a turn of one run is copied anyway"
        assert any(len(files) > 1 for files in cache.files) is virtual, "virtual memory came in pieces"
        mover.close()


def overwrite(cache: FileCache, ids: np.ndarray) -> None:
    for plane in cache.layouts[0][0].planes:
        for block in ids.ravel().tolist():
            start = plane.offset + block * plane.stride
            cache.storages[plane.storage][start : start + plane.block_bytes] = 0xAA


def test_blocks_in_a_row_are_copied_and_scattered_ones_gathered(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(gap=0), PER_CHUNK)])
    with MoverRig(tmp_path, staging(CHUNK)) as rig:
        mover = join(rig.ready(), cache)
        rig.grant(b"g", Direction.STORE, places(2), CHUNK)
        rows = np.arange(8).reshape(2, PER_CHUNK)
        rows[1] = [40, 42, 44, 46]

        assert store(mover, job(rows), soon()) == frozenset()

        assert cache.ways == ["copies", "kernel"]
        assert [rig.bytes_at(0, n * CHUNK, CHUNK) for n in range(2)] == [expected(cache, ids) for ids in rows]
        mover.close()


@pytest.mark.parametrize("way", ["kernel", "copies"])
def test_blocks_that_are_nowhere_are_stored_as_zeros_and_skipped_ones_are_not_written(tmp_path: Path, way: str) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    cache.let(way)
    with MoverRig(tmp_path, staging()) as rig:
        mover = join(rig.ready(), cache)
        ids = some_ids(3)
        ids[0, :2] = 0
        rig.grant(b"g", Direction.STORE, places(3), CHUNK)

        assert store(mover, job(ids, null_block=0), soon()) == frozenset()

        null = np.where(ids == 0, -1, ids)
        assert [rig.bytes_at(0, n * CHUNK, CHUNK) for n in range(3)] == [expected(cache, row) for row in null]
        wanted = [s.copy() for s in cache.storages]
        targets = some_ids(3, seed=5)
        for chunk, skipped in enumerate([4, 1, 0]):
            data = np.frombuffer(rig.bytes_at(0, chunk * CHUNK, CHUNK), dtype=np.uint8)
            reference.scatter_blocks(wanted, cache.layouts[0][0], targets[chunk], skipped, data)
        rig.grant(b"l", Direction.LOAD, places(3), CHUNK)

        assert load(mover, job(targets, b"l", skip=np.array([4, 1, 0])), soon()) == frozenset()

        for storage, after in zip(cache.storages, wanted, strict=True):
            assert (storage == after).all()
        mover.close()


def test_both_directions_at_once(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    with MoverRig(tmp_path, staging(CHUNK)) as rig:
        mover = join(rig.ready(), cache)
        rig.grant(b"in", Direction.LOAD, places(8), CHUNK)
        rig.grant(b"out", Direction.STORE, [(0, 500_000 + n * CHUNK) for n in range(8)], CHUNK)
        ids = np.arange(64).reshape(16, PER_CHUNK)
        result: list[frozenset[int]] = []
        thread = threading.Thread(target=lambda: result.append(load(mover, job(ids[:8], b"in"), soon())))
        thread.start()

        assert store(mover, job(ids[8:], b"out"), soon()) == frozenset()
        thread.join(PATIENCE_S)

        assert result == [frozenset()]
        assert expected(cache, ids[0]) == b"\xdd" * CHUNK
        assert rig.bytes_at(0, 500_000, CHUNK) == expected(cache, ids[8])
        mover.close()


def test_jobs_that_follow_each_other_end_in_their_order_with_their_own_chunks(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    with MoverRig(tmp_path, staging(CHUNK, slots=2)) as rig:
        mover = join(rig.ready(), cache)
        ids, ends = np.arange(48).reshape(3, 4, PER_CHUNK), list[int]()
        rig.mover.revoke(b"\1", time.monotonic())
        rig.until(lambda: bool(rig.revoked))
        jobs = [job(ids[n], bytes([n]), over=lambda n=n: ends.append(n)) for n in range(3)]
        for n, each in enumerate(jobs):
            mover.begin(Direction.STORE, each, soon())
            if n != 1:
                rig.grant(bytes([n]), Direction.STORE, [(0, (4 * n + c) * CHUNK) for c in range(4)], CHUNK)

        jobs[2].finish()

        assert ends == [0, 1, 2]
        assert [each.lost for each in jobs] == [frozenset(), {0, 1, 2, 3}, frozenset()]
        for n in (0, 2):
            got = [rig.bytes_at(0, (4 * n + c) * CHUNK, CHUNK) for c in range(4)]
            assert got == [expected(cache, row) for row in ids[n]]
        mover.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_jobs_revocations_and_cancels_show_no_wrong_byte(tmp_path: Path, seed: int) -> None:
    """Whatever is said to be moved is the right bytes, and no other block or chunk has changed."""
    rng = np.random.default_rng(seed)
    cache = FileCache(tmp_path, [(planes(gap=int(rng.integers(2)) * 32), PER_CHUNK)], virtual=bool(seed % 2))
    with MoverRig(tmp_path, staging(int(rng.integers(160, 3 * CHUNK)), slots=int(rng.integers(1, 4)))) as rig:
        mover = join(rig.ready(), cache)
        arena = [b"\xdd" * CHUNK for _ in range(16)]
        for number in range(25):
            count, name = int(rng.integers(1, 6)), number.to_bytes(4, "little")
            ids = some_ids(count, seed=int(rng.integers(1000)))
            if rng.integers(2):
                ids = np.sort(ids.ravel()).reshape(ids.shape)
            where = rng.permutation(16)[:count].tolist()
            direction = Direction.STORE if rng.integers(2) else Direction.LOAD
            made = job(ids, name)
            if rng.integers(4):
                rig.grant(name, direction, [(0, n * CHUNK) for n in where], CHUNK)
            else:
                rig.mover.revoke(name, time.monotonic())
                rig.until(lambda name=name: any(r.grant == name for r in rig.revoked))
            if not rng.integers(4):
                assert made.cancel(0.0)
            before = [storage.copy() for storage in cache.storages]

            lost = run(mover, direction, made, soon())

            for chunk, place in enumerate(where):
                if chunk in lost:
                    continue
                if direction is Direction.STORE:
                    arena[place] = expected(cache, ids[chunk])
                else:
                    data = np.frombuffer(arena[place], dtype=np.uint8)
                    reference.scatter_blocks(before, cache.layouts[0][0], ids[chunk], 0, data)
            assert [rig.bytes_at(0, n * CHUNK, CHUNK) for n in range(16)] == arena
            for storage, wanted in zip(cache.storages, before, strict=True):
                assert (storage == wanted).all()
        assert {"kernel", "copies"} & set(cache.ways)
        mover.close()


def test_a_job_waits_for_the_engines_event_before_the_mover_hears_of_it(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    heard: list[list[str]] = []
    cache.wait = lambda event: (cache.events.append(event), heard.append(cache.ways))  # type: ignore[method-assign]
    with MoverRig(tmp_path, staging()) as rig:
        mover = join(rig.ready(), cache)
        rig.grant(b"g", Direction.STORE, places(1), CHUNK)

        store(mover, job(some_ids(1), after=77), soon())

        assert (cache.events, heard) == ([77], [[]])
        assert cache.ways
        mover.close()


def test_checksums_are_made_and_a_chunk_with_a_wrong_one_reaches_no_block(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    kind = int(ChecksumKind.BLAKE3)
    with MoverRig(tmp_path, staging()) as rig:
        mover = join(rig.ready(), cache)
        stored = job(some_ids(4))
        rig.grant(b"g", Direction.STORE, places(4), CHUNK, [(kind, bytes(16))] * 4)
        assert store(mover, stored, soon()) == frozenset()
        sums = [checksum(expected(cache, ids), ChecksumKind.BLAKE3) for ids in stored.ids]
        rig.mover.revoke(b"g", time.monotonic())
        rig.until(lambda: bool(rig.revoked))
        made = np.frombuffer(rig.revoked[0].checks, dtype=CHECK)
        assert [row.tobytes() for row in made["checksum"]] == sums
        assert rig.revoked[0].moved_bytes == 4 * CHUNK
        rig.spoil(0, 2 * CHUNK + 5)
        overwrite(cache, stored.ids)
        rig.grant(b"l", Direction.LOAD, places(4), CHUNK, [(kind, each) for each in sums])
        loaded = job(some_ids(4), b"l")

        assert load(mover, loaded, soon()) == {2}

        assert loaded.wrong == {2}
        got = [
            checksum(expected(cache, ids), ChecksumKind.BLAKE3) == made
            for ids, made in zip(loaded.ids, sums, strict=True)
        ]
        assert got == [True, True, False, True]
        assert expected(cache, loaded.ids[2]) == b"\xaa" * CHUNK
        mover.close()


# --- what a client may not say ---------------------------------------------------------------------------------------


class Talk:
    """A client that says what it likes."""

    def __init__(self, rig: MoverRig) -> None:
        self.pipes: list[Pipe[ToClient]] = [
            join_mover(rig.mover.address, Join(secret=SECRET, direction=d, generation=1), soon()) for d in Direction
        ]

    def show(self, cache: FileCache, export: Export | None = None) -> str:
        for piece, descriptor in cache.pieces():
            self.pipes[0].send(piece, descriptor)
        self.pipes[0].send(export or cache.export())
        answer = self.pipes[0].receive(soon())
        assert isinstance(answer, Exported)
        return answer.error

    def ask(self, ids: np.ndarray, chunks: tuple[int, ...], group: int = 0, grant: bytes = b"g", lane: int = 0) -> Done:
        self.pipes[lane].send(Job(job=1, group=group, grant=grant, chunks=chunks, ids=ids.astype("<i8").tobytes()))
        answer = self.pipes[lane].receive(soon())
        assert isinstance(answer, Done)
        return answer

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()


@pytest.mark.behaviour("D005", "D006")
@pytest.mark.parametrize(
    ("ids", "chunks", "group", "text"),
    [
        ([[0, 1, 2, BLOCKS]], (0,), 0, "not in"),
        ([[0, 1, 2, -2]], (0,), 0, "not in"),
        ([[0, 1, 2, 2]], (0,), 0, "twice"),
        ([[0, 1, 2, 3], [4, 5, 6, 0]], (0, 1), 0, "twice"),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], (0, 0), 0, "twice"),
        ([[0, 1, 2]], (0,), 0, "reshape"),
        ([[0, 1, 2, 3]], (0,), 1, "group 1 of 1"),
        ([[0, 1, 2, 3]], (5,), 0, "grant"),
    ],
)
def test_the_mover_checks_what_a_job_names_before_anything_moves(
    tmp_path: Path, ids: list[list[int]], chunks: tuple[int, ...], group: int, text: str
) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    with MoverRig(tmp_path, staging()) as rig:
        rig.ready()
        talk = Talk(rig)
        assert talk.show(cache) == ""
        rig.grant(b"g", Direction.STORE, places(2), CHUNK)

        done = talk.ask(np.array(ids), chunks, group)

        assert text in done.error
        assert set(done.failed) == set(chunks)
        assert cache.ways == []
        assert talk.ask(np.arange(4)[None], (0,)).failed == (), "the next one is served"
        talk.close()


@pytest.mark.parametrize(
    ("plane", "blocks", "text"),
    [
        (CachePlane(0, 0, 4096, 4096), 2, "ends at 8192"),
        (CachePlane(1, 0, 96, 96), 2, "memory 1"),
        (CachePlane(0, 0, 95, 96), 2, "at a distance of 95"),
        (CachePlane(0, 0, 4096, 4096), 1, "does not fit a ring slot"),
    ],
)
def test_planes_that_do_not_lie_in_what_was_exported_are_refused(
    tmp_path: Path, plane: CachePlane, blocks: int, text: str
) -> None:
    one = Layout(
        planes=(Plane(name="0", storage=0, offset=0, stride=PAGE, block_bytes=PAGE, packing="p"),),
        blocks=1,
        block_tokens=1,
    )
    cache = FileCache(tmp_path, [(one, 1)])
    with MoverRig(tmp_path, staging(slot_bytes=1024)) as rig:
        rig.ready()
        talk = Talk(rig)

        error = talk.show(cache, Export(groups=(CacheGroup(planes=(plane,), blocks=blocks, blocks_per_chunk=1),)))

        assert text in error
        assert talk.ask(np.zeros((1, 1)), (0,)).error == "group 0 of 0"
        talk.close()


def test_a_piece_without_its_descriptor_ends_the_connection_and_not_the_mover(tmp_path: Path) -> None:
    with MoverRig(tmp_path, staging()) as rig:
        rig.ready()
        talk = Talk(rig)
        talk.pipes[0].send(Piece(memory=0, length=PAGE))

        with pytest.raises(ConnectionError):
            talk.pipes[0].receive(soon())

        rig.until(lambda: True)
        assert rig.mover.state is MoverState.READY
        talk.close()


def test_a_device_that_refuses_the_cache_is_told_with_the_reason(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    cache.let("refuse")
    with MoverRig(tmp_path, staging()) as rig:
        rig.ready()

        with pytest.raises(RingRetiredError, match="cannot map the cache: the kernel cannot be made"):
            join(rig, cache)


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_job_of_a_revoked_grant_fails_whole_and_the_next_one_is_served(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    with MoverRig(tmp_path, staging()) as rig:
        mover = join(rig.ready(), cache)
        rig.grant(b"g", Direction.STORE, places(5), CHUNK)
        rig.mover.revoke(b"g", time.monotonic())
        rig.until(lambda: bool(rig.revoked))

        assert store(mover, job(some_ids(5)), soon()) == set(range(5))

        rig.grant(b"h", Direction.STORE, places(5), CHUNK)
        assert store(mover, job(some_ids(5), b"h"), soon()) == frozenset()
        mover.close()


def test_a_cancelled_job_begins_nothing(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    with MoverRig(tmp_path, staging()) as rig:
        mover = join(rig.ready(), cache)
        rig.grant(b"g", Direction.STORE, places(3), CHUNK)
        cancelled = job(some_ids(3))

        assert cancelled.cancel(0.0)
        assert store(mover, cancelled, soon()) == {0, 1, 2}

        assert cache.ways == []
        mover.close()


def test_a_job_that_is_cancelled_under_way_ends_soon_and_what_it_did_not_begin_fails(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    with MoverRig(tmp_path, staging(CHUNK, slots=2)) as rig:
        mover = join(rig.ready(), cache)
        lost: list[frozenset[int]] = []
        # Without its grant the mover waits, for two seconds at most, before it begins the first turn.
        running = job(some_ids(9))
        thread = threading.Thread(target=lambda: lost.append(store(mover, running, soon())))
        thread.start()
        cancelling = threading.Thread(target=lambda: lost.append(frozenset([running.cancel(PATIENCE_S)])))
        rig.until(lambda: running._stop is not None)
        told, sent = running._stop, threading.Event()
        running._stop = lambda: (told(), sent.set())  # type: ignore[misc]
        cancelling.start()
        rig.until(sent.is_set)
        rig.grant(b"g", Direction.STORE, places(9), CHUNK)
        thread.join(PATIENCE_S)
        cancelling.join(PATIENCE_S)

        failed = next(f for f in lost if f != {True})
        assert {True} in lost, "nothing ran when cancel returned"
        assert failed >= set(range(1, 9)), "at most what had been begun was moved"
        mover.close()


def test_a_job_that_outlived_its_cancel_counts_for_nothing(tmp_path: Path) -> None:
    """Its blocks may have changed under it."""
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    with MoverRig(tmp_path, staging()) as rig:
        mover = join(rig.ready(), cache)
        lost: list[frozenset[int]] = []
        running = job(some_ids(2))
        thread = threading.Thread(target=lambda: lost.append(store(mover, running, soon())))
        thread.start()
        rig.until(lambda: running._stop is not None)
        running._stop = lambda: None  # the word gets lost

        assert not running.cancel(0.0)
        rig.grant(b"g", Direction.STORE, places(2), CHUNK)
        thread.join(PATIENCE_S)

        assert lost == [{0, 1}]
        assert cache.ways
        mover.close()


@pytest.mark.behaviour("R132")
def test_a_load_that_gets_no_answer_ends_only_when_the_mover_is_gone(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    told = threading.Event()
    with MoverRig(tmp_path, staging()) as rig:
        rig.ready()
        joins = [Join(secret=SECRET, direction=d, generation=1) for d in Direction]
        mover = MappedMover(cache, rig.mover.address, joins, soon(), told.set)
        cache.let("stall")
        rig.grant(b"l", Direction.LOAD, places(2), CHUNK)
        ended: list[str] = []

        def late() -> None:
            with suppress(RingRetiredError):
                load(mover, job(some_ids(2), b"l"), time.monotonic() + 0.2)
            ended.append("load")

        thread = threading.Thread(target=late)
        thread.start()
        assert told.wait(PATIENCE_S), "its client says at once that it is retired"
        assert "no message came in time" in mover.retired
        thread.join(0.3)
        assert ended == [], "the mover may still write"

        rig.mover.kill("the client retired it")
        thread.join(PATIENCE_S)

        assert ended == ["load"]
        with pytest.raises(RingRetiredError):
            store(mover, job(some_ids(1)), soon())
        mover.close()


def test_an_engine_whose_device_fails_ends_its_jobs(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    told, ended = threading.Event(), list[str]()

    def fail(event: int) -> None:
        raise CudaError("cuEventSynchronize", event, "the device is lost")

    cache.wait = fail  # type: ignore[method-assign]
    with MoverRig(tmp_path, staging()) as rig:
        joins = [Join(secret=SECRET, direction=d, generation=1) for d in Direction]
        mover = MappedMover(cache, rig.ready().mover.address, joins, soon(), told.set)
        lost = job(some_ids(1), after=700, over=lambda: ended.append("over"))
        thread = threading.Thread(target=lambda: mover.begin(Direction.STORE, lost, soon()))
        thread.start()
        assert told.wait(PATIENCE_S)
        rig.mover.kill("the client retired it")
        thread.join(PATIENCE_S)

        assert (ended, lost.lost) == (["over"], None)
        assert "the device is lost" in mover.retired
        mover.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_a_mover_that_dies_ends_a_job_without_success(tmp_path: Path, direction: Direction) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    with MoverRig(tmp_path, staging()) as rig:
        mover = join(rig.ready(), cache)
        cache.let("stall")
        rig.grant(b"g", direction, places(3), CHUNK)
        failures: list[str] = []

        def hurt() -> None:
            try:
                run(mover, direction, job(some_ids(3)), soon())
            except RingRetiredError as e:
                failures.append(str(e))

        thread = threading.Thread(target=hurt)
        thread.start()
        rig.until(lambda: bool(cache.ways))
        os.kill(rig.mover.pid, signal.SIGKILL)
        thread.join(PATIENCE_S)

        assert failures
        mover.close()


def test_a_failed_device_ends_the_mover_with_the_reason(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    with MoverRig(tmp_path, staging()) as rig:
        mover = join(rig.ready(), cache)
        cache.let("fail")
        rig.grant(b"g", Direction.STORE, places(3), CHUNK)

        with pytest.raises(RingRetiredError):
            store(mover, job(some_ids(3)), soon())

        rig.until(lambda: rig.mover.state is MoverState.REAPED)
        assert "illegal address" in rig.mover.reason
        mover.close()


def test_a_client_that_leaves_in_the_middle_of_a_job_lets_the_grant_end(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, [(planes(), PER_CHUNK)])
    with MoverRig(tmp_path, staging(CHUNK, slots=2)) as rig:
        rig.ready()
        talk = Talk(rig)
        assert talk.show(cache) == ""
        ids = some_ids(9)
        talk.pipes[0].send(Job(job=1, group=0, grant=b"g", chunks=tuple(range(9)), ids=ids.astype("<i8").tobytes()))
        talk.close()
        rig.grant(b"g", Direction.STORE, places(9), CHUNK)
        rig.mover.revoke(b"g", time.monotonic())

        rig.until(lambda: bool(rig.revoked))

        assert rig.revoked[0].moved_bytes < 9 * CHUNK
        assert rig.mover.state is MoverState.READY
