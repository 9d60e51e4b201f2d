# SPDX-License-Identifier: Apache-2.0
"""The ring with a mover process whose device is a file: real messages, real bytes, real deaths."""

import itertools
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.mover_rig import PATIENCE_S, MoverRig
from tests.fakes.ring_device import FakeEngineDevice, make_ring

from kvpool.model.checksum import ChecksumKind, checksum
from kvpool.model.slots import CHECK
from kvpool.transfer import reference
from kvpool.transfer.mover.messages import Direction, Revoked
from kvpool.transfer.mover.supervision import MoverLimits, MoverState
from kvpool.transfer.plan import slot_ids
from kvpool.transfer.planes import Layout, Plane
from kvpool.transfer.ring import EngineRing, RingRetiredError, slots_that_fit
from kvpool.transfer.ring_ports import RingJob

BLOCKS, PER_CHUNK = 64, 4
SIZES = (96, 32, 160)
CHUNK = sum(SIZES) * PER_CHUNK


def planes() -> Layout:
    made, at = [], 0
    for number, size in enumerate(SIZES):
        made.append(Plane(name=str(number), storage=0, offset=at, stride=size + 32, block_bytes=size, packing="p"))
        at += BLOCKS * (size + 32)
    return Layout(planes=tuple(made), blocks=BLOCKS, block_tokens=16)


def device(folder: Path, slots: int = 3, slot_bytes: int = 2 * CHUNK) -> FakeEngineDevice:
    ring = make_ring(folder / "ring", slots, slot_bytes)
    rng = np.random.default_rng(1)
    storage = rng.integers(0, 256, BLOCKS * (sum(SIZES) + 32 * len(SIZES)), dtype=np.uint8)
    return FakeEngineDevice(ring, planes(), [storage], PER_CHUNK)


def job(chunks: int, grant: bytes = b"g", **more: object) -> RingJob:
    ids = np.random.default_rng(2).permutation(BLOCKS)[: chunks * PER_CHUNK].reshape(chunks, PER_CHUNK)
    return RingJob(group=0, grant=grant, ids=slot_ids(ids, BLOCKS, **more), chunks=range(chunks))  # type: ignore[arg-type]


def expected(engine: FakeEngineDevice, ids: np.ndarray) -> bytes:
    out = np.zeros(CHUNK, dtype=np.uint8)
    reference.gather_blocks(engine.storages, engine.layout, ids, out, -1)
    return out.tobytes()


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def places(chunks: int, gap: int = 0) -> list[tuple[int, int]]:
    return [(0, n * (CHUNK + gap)) for n in range(chunks)]


@pytest.mark.behaviour("R018", "R029")
@pytest.mark.parametrize(("slot_bytes", "pieces"), [(2 * CHUNK, 5), (CHUNK, 9), (700, 18), (200, 63)])
@pytest.mark.parametrize("listen", ["", "tcp:127.0.0.1:0"])
def test_what_is_stored_comes_back(tmp_path: Path, slot_bytes: int, pieces: int, listen: str) -> None:
    engine = device(tmp_path, slot_bytes=slot_bytes)
    with MoverRig(tmp_path, engine.ring, listen=listen) as rig:
        ring = rig.ready().join(engine)
        stored = job(9)
        rig.grant(b"g", Direction.STORE, places(9, gap=64), CHUNK)

        assert ring.store(stored, soon()) == frozenset()

        assert engine.launches == pieces, "as many whole chunks, all of their layers, as a slot takes"
        for number, (region, offset) in enumerate(places(9, gap=64)):
            assert rig.bytes_at(region, offset, CHUNK) == expected(engine, stored.ids[number])
        before = engine.storages[0].copy()
        used = stored.ids.ravel()
        for plane in engine.layout.planes:
            for block in used.tolist():
                start = plane.offset + block * plane.stride
                engine.storages[0][start : start + plane.block_bytes] = 0xAA
        rig.grant(b"l", Direction.LOAD, places(9, gap=64), CHUNK)

        assert ring.load(RingJob(group=0, grant=b"l", ids=stored.ids, chunks=range(9)), soon()) == frozenset()

        assert (engine.storages[0] == before).all()
        ring.close()


def test_both_directions_at_once(tmp_path: Path) -> None:
    engine = device(tmp_path, slot_bytes=CHUNK)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"in", Direction.LOAD, places(8), CHUNK)
        rig.grant(b"out", Direction.STORE, [(0, 500_000 + n * CHUNK) for n in range(8)], CHUNK)
        ids = slot_ids(np.arange(64).reshape(16, PER_CHUNK), BLOCKS)
        loads = RingJob(group=0, grant=b"in", ids=ids[:8], chunks=range(8))
        stores = RingJob(group=0, grant=b"out", ids=ids[8:], chunks=range(8))
        result: list[frozenset[int]] = []
        thread = threading.Thread(target=lambda: result.append(ring.load(loads, soon())))
        thread.start()

        assert ring.store(stores, soon()) == frozenset()
        thread.join(PATIENCE_S)

        assert result == [frozenset()]
        assert expected(engine, ids[0]) == b"\xdd" * CHUNK
        assert rig.bytes_at(0, 500_000, CHUNK) == expected(engine, ids[8])
        ring.close()


NONE, XXH3, BLAKE3 = (int(kind) for kind in ChecksumKind)


def checks_of(end: Revoked) -> list[tuple[int, bytes]]:
    return [(int(row["kind"]), row["checksum"].tobytes()) for row in np.frombuffer(end.checks, dtype=CHECK)]


@pytest.mark.parametrize("slot_bytes", [2 * CHUNK, 700])
def test_checksums_of_stored_chunks_are_made_from_where_they_lie(tmp_path: Path, slot_bytes: int) -> None:
    engine = device(tmp_path, slot_bytes=slot_bytes)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        kinds = [XXH3, NONE, BLAKE3, XXH3, NONE, XXH3, XXH3]
        rig.grant(b"g", Direction.STORE, places(7), CHUNK, [(kind, bytes(16)) for kind in kinds])
        stored = job(7)
        stored.chunks = range(6)  # the last one never comes

        assert ring.store(stored, soon()) == frozenset()
        rig.mover.revoke(b"g", time.monotonic())
        rig.until(lambda: bool(rig.revoked))

        made = [checksum(expected(engine, ids), ChecksumKind(k)) for ids, k in zip(stored.ids, kinds, strict=True)]
        assert checks_of(rig.revoked[0]) == [*zip(kinds[:6], made[:6], strict=True), (NONE, bytes(16))]
        assert rig.revoked[0].moved_bytes == 6 * CHUNK
        ring.close()


def test_a_part_that_comes_again_counts_in_the_checksum(tmp_path: Path) -> None:
    engine = device(tmp_path, slot_bytes=700)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.STORE, places(2), CHUNK, [(XXH3, bytes(16))] * 2)
        stored = job(1)
        ring.store(stored, soon())
        engine.storages[0][:] = 7
        ring.store(RingJob(group=0, grant=b"g", ids=stored.ids, chunks=range(1)), soon())

        rig.mover.revoke(b"g", time.monotonic())
        rig.until(lambda: bool(rig.revoked))

        assert checks_of(rig.revoked[0]) == [(XXH3, checksum(b"\7" * CHUNK, ChecksumKind.XXH3)), (NONE, bytes(16))]
        ring.close()


def test_a_revoked_grant_ends_after_its_checksums(tmp_path: Path) -> None:
    """More chunks than may wait for their checksum, revoked at once."""
    engine = device(tmp_path, slots=4, slot_bytes=4 * CHUNK)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.STORE, places(16), CHUNK, [(XXH3, bytes(16))] * 16)

        assert ring.store(job(16), soon()) == frozenset()
        rig.mover.revoke(b"g", time.monotonic())
        rig.until(lambda: bool(rig.revoked))

        assert [kind for kind, _ in checks_of(rig.revoked[0])] == [XXH3] * 16
        ring.close()


@pytest.mark.parametrize("wrong", [{1}, {0, 3}, {2, 5, 6}, set(range(8))], ids=str)
@pytest.mark.parametrize("slot_bytes", [4 * CHUNK, CHUNK, 700])
def test_a_chunk_that_is_not_what_was_stored_never_reaches_a_block(
    tmp_path: Path, slot_bytes: int, wrong: set[int]
) -> None:
    engine = device(tmp_path, slots=2, slot_bytes=slot_bytes)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        good = checksum(b"\xdd" * CHUNK, ChecksumKind.XXH3)
        # One chunk has no checksum: nothing is known of it.
        kinds = [NONE if chunk == 4 else XXH3 for chunk in range(8)]
        rig.grant(b"l", Direction.LOAD, places(8), CHUNK, [(kind, good) for kind in kinds])
        for chunk in wrong:
            rig.spoil(0, chunk * CHUNK + 17)
        before = engine.storages[0].copy()
        load = job(8, grant=b"l")

        lost = ring.load(load, soon())

        expects = wrong - {4}
        assert lost == load.wrong == expects
        for chunk, ids in enumerate(load.ids):
            for block in ids.tolist():
                for plane in engine.layout.planes:
                    at = plane.offset + block * plane.stride
                    found = engine.storages[0][at : at + plane.block_bytes]
                    was = before[at : at + plane.block_bytes]
                    assert (found == was).all() if chunk in expects else (found[32:] == 0xDD).all()
        rig.mover.revoke(b"l", time.monotonic())
        rig.until(lambda: bool(rig.revoked))
        assert set(rig.revoked[0].wrong) == expects
        assert rig.revoked[0].verified == 7 - len(expects)
        ring.close()


def test_skipped_and_null_blocks_are_not_touched(tmp_path: Path) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.LOAD, places(2), CHUNK)
        before = engine.storages[0].copy()
        ids = slot_ids(np.array([[60, 1, 2, 0], [0, 0, 3, 4]]), BLOCKS, null_block=0, skip=np.array([2, 0]))

        ring.load(RingJob(group=0, grant=b"g", ids=ids, chunks=[0, 1]), soon())

        changed = {
            block
            for plane in engine.layout.planes
            for block in range(BLOCKS)
            if (
                engine.storages[0][plane.offset + block * plane.stride :][: plane.block_bytes]
                != before[plane.offset + block * plane.stride :][: plane.block_bytes]
            ).any()
        }
        assert changed == {2, 3, 4}
        ring.close()


def test_what_was_not_granted_is_not_moved(tmp_path: Path) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.LOAD, places(2), CHUNK)

        assert ring.store(job(2), soon()) == {0, 1}
        assert rig.bytes_at(0, 0, CHUNK) == b"\xdd" * CHUNK

        rig.grant(b"short", Direction.STORE, places(1), CHUNK)
        assert ring.store(job(2, b"short"), soon()) == {0, 1}
        assert not ring.retired
        ring.close()


def test_a_revoked_grant_moves_nothing_more(tmp_path: Path) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.STORE, places(5), CHUNK)
        ring.store(job(4), soon())

        rig.mover.revoke(b"g", time.monotonic())
        rig.until(lambda: bool(rig.revoked))

        assert [(r.grant, r.moved_bytes) for r in rig.revoked] == [(b"g", 4 * CHUNK)]
        assert ring.store(job(4), soon()) == {0, 1, 2, 3}
        ring.close()


@pytest.mark.parametrize("kind", [NONE, XXH3])
@pytest.mark.parametrize("slot_bytes", [2 * CHUNK, 700])
def test_a_store_that_has_brought_all_ends_its_grant_by_itself(tmp_path: Path, slot_bytes: int, kind: int) -> None:
    engine = device(tmp_path, slot_bytes=slot_bytes)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.STORE, places(4), CHUNK, [(kind, bytes(16))] * 4)
        three = job(4)
        three.chunks = [0, 1, 3]
        assert ring.store(three, soon()) == ring.store(three, soon()) == frozenset(), "what comes again is not the rest"
        rig.flush()
        assert not rig.revoked

        last = job(4)
        last.chunks = [2]
        assert ring.store(last, soon()) == frozenset()

        rig.until(lambda: bool(rig.revoked))
        assert rig.revoked[0].moved_bytes == 7 * CHUNK
        assert [k for k, _ in checks_of(rig.revoked[0])] == [kind] * 4
        assert ring.store(last, soon()) == {2}, "nothing more is moved"
        rig.mover.revoke(b"g", time.monotonic())
        rig.until(lambda: len(rig.revoked) > 1)
        assert rig.revoked[1] == rig.revoked[0], "a Revoke that crosses the word is answered with the same"
        ring.close()


def test_a_load_that_has_read_all_ends_its_grant_by_itself(tmp_path: Path) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.LOAD, places(2), CHUNK)
        one = job(2)
        one.chunks = [0]
        assert ring.load(one, soon()) == ring.load(one, soon()) == frozenset(), "what is read again is not the rest"
        rig.flush()
        assert not rig.revoked

        assert ring.load(job(2), soon()) == frozenset()

        rig.until(lambda: bool(rig.revoked))
        assert rig.revoked[0].moved_bytes == 4 * CHUNK
        assert ring.load(job(2), soon()) == {0, 1}, "nothing more is moved"
        ring.close()


def test_memory_that_was_taken_back_is_reached_no_more(tmp_path: Path) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring, regions=(1 << 20, 1 << 20)) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.STORE, [(1, n * CHUNK) for n in range(5)], CHUNK)
        assert ring.store(job(4), soon()) == frozenset()
        path = str(rig.regions[1])
        maps = Path(f"/proc/{rig.mover.pid}/maps")
        assert path in maps.read_text()

        rig.mover.take_segment(1)
        rig.until(lambda: path not in maps.read_text())

        rig.grant(b"h", Direction.STORE, places(4), CHUNK)
        assert ring.store(job(4, b"h"), soon()) == frozenset()
        with pytest.raises(RingRetiredError):
            ring.store(job(4), soon())
        rig.until(lambda: rig.mover.state is MoverState.REAPED)
        assert "of memory 1" in rig.mover.reason
        ring.close()


def test_a_cancelled_store_reads_no_more_blocks(tmp_path: Path) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.STORE, places(4), CHUNK)
        cancelled = job(4)

        assert cancelled.cancel(1.0)

        assert ring.store(cancelled, soon()) == {0, 1, 2, 3}
        assert engine.launches == 0
        ring.close()


def test_what_is_gathered_before_its_grant_goes_on_with_it(tmp_path: Path) -> None:
    engine = device(tmp_path, slots=4, slot_bytes=CHUNK)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        stored, before = job(5, b""), job(5)
        stored.after = 77
        was = [expected(engine, row) for row in stored.ids]

        ring.gather(stored)
        rig.until(lambda: not stored._launched)
        assert (engine.launches, engine.events) == (2, [77]), "half of the slots stay free"
        engine.storages[0][:] = 0xAA
        later = [expected(engine, row) for row in stored.ids]
        rig.grant(b"g", Direction.STORE, places(5), CHUNK)
        rig.grant(b"b", Direction.STORE, [(0, n * CHUNK) for n in range(5, 10)], CHUNK)
        before.grant, stored.grant = b"b", b"g"
        assert ring.store(before, soon()) == frozenset(), "another one that is granted first has slots enough"
        assert ring.store(stored, soon()) == frozenset()

        assert [rig.bytes_at(0, n * CHUNK, CHUNK) for n in range(5)] == [*was[:2], *later[2:]]
        assert [rig.bytes_at(0, n * CHUNK, CHUNK) for n in range(5, 10)] == later
        assert (engine.launches, engine.events) == (10, [77]), "nothing is gathered twice"
        ring.close()


def test_a_mover_is_asked_for_what_was_gathered_only_once_it_was(tmp_path: Path) -> None:
    engine = device(tmp_path, slots=4, slot_bytes=CHUNK)
    going, go, run = threading.Event(), threading.Event(), engine._run

    def held(*what: object) -> None:
        going.set()
        assert go.wait(PATIENCE_S)
        run(*what)  # type: ignore[arg-type]

    engine._run = held  # type: ignore[method-assign]
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        stored = job(2, b"")
        ring.gather(stored)
        assert going.wait(PATIENCE_S)
        rig.grant(b"g", Direction.STORE, places(2), CHUNK)
        asked: list[int] = []
        lane, stored.grant = ring._stores._lane, b"g"
        ask = lane.ask
        lane.ask = lambda number, *what: (asked.append(number), ask(number, *what))[1]  # type: ignore[func-returns-value]
        thread = threading.Thread(target=lambda: ring.store(stored, soon()))
        thread.start()

        rig.until(lambda: bool(lane.under_way))
        assert not asked

        go.set()
        thread.join(PATIENCE_S)
        assert len(asked) == 2
        assert [rig.bytes_at(0, n * CHUNK, CHUNK) for n in range(2)] == [expected(engine, row) for row in stored.ids]
        ring.close()


def test_what_is_gathered_in_vain_leaves_its_slots_to_others(tmp_path: Path) -> None:
    engine = device(tmp_path, slots=4, slot_bytes=CHUNK)
    (tmp_path / "ring.stall").touch()  # no copy ends
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        vain, second, third = job(5, b""), job(5, b""), job(5, b"")

        for made in (vain, second):
            ring.gather(made)
        assert engine.launches == 2, "there is none for a second one"
        ring.forget(vain)
        ring.forget(vain)
        ring.gather(third)
        ring.forget(second)
        ring.forget(third)

        rig.grant(b"g", Direction.STORE, places(9), CHUNK)
        threading.Thread(target=lambda: _ignoring_the_end(ring, job(9))).start()
        rig.until(lambda: engine.launches == 2 + 2 + 4)
        ring.retire("the test is over")
        ring.close()


def test_nothing_is_gathered_in_a_ring_that_is_retired(tmp_path: Path) -> None:
    engine = device(tmp_path, slots=4, slot_bytes=CHUNK)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        ring.retire("the test says so")

        ring.gather(late := job(5, b""))

        assert (late.gathered, engine.launches) == ([], 0)
        ring.close()


def test_a_cancelled_store_gathers_nothing_before_its_grant(tmp_path: Path) -> None:
    engine = device(tmp_path, slots=4, slot_bytes=CHUNK)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        cancelled = job(4, b"")
        assert cancelled.cancel(0.0)

        ring.gather(cancelled)

        assert (engine.launches, cancelled.gathered) == (0, [])
        ring.close()


@pytest.mark.behaviour("R014", "D001")
@pytest.mark.parametrize("direction", list(Direction))
def test_the_first_kernel_follows_the_engines_event(tmp_path: Path, direction: Direction) -> None:
    engine = device(tmp_path)
    seen: list[tuple[Direction, int, int]] = []
    engine.follow = lambda *followed: seen.append((*followed, engine.launches))  # type: ignore[method-assign]
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", direction, places(4), CHUNK)
        after = job(4)
        after.after = 77

        (ring.store if direction is Direction.STORE else ring.load)(after, soon())

        assert seen == [(direction, 77, 0)], "before anything is launched"
        assert engine.launches
        ring.close()


@pytest.mark.behaviour("D029")
def test_kernels_are_launched_ahead_of_the_copies(tmp_path: Path) -> None:
    engine = device(tmp_path, slots=3, slot_bytes=CHUNK)
    (tmp_path / "ring.stall").touch()  # no copy ends
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.STORE, places(9), CHUNK)
        thread = threading.Thread(target=lambda: _ignoring_the_end(ring, job(9)))
        thread.start()

        rig.until(lambda: engine.launches == 3)

        ring.retire("the test is over")
        thread.join(PATIENCE_S)
        assert engine.launches == 3, "and no further than there are slots"
        ring.close()


def test_the_next_job_begins_while_the_mover_has_the_former_ones_slots(tmp_path: Path) -> None:
    engine = device(tmp_path, slots=3, slot_bytes=CHUNK)
    (tmp_path / "ring.stall").touch()  # no copy ends
    ends: list[str] = []
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.STORE, places(9), CHUNK)
        first, second = job(2), job(1)
        first.over, second.over = partial(ends.append, "first"), partial(ends.append, "second")

        ring.begin(Direction.STORE, first, soon())
        ring.begin(Direction.STORE, second, soon())

        assert engine.launches == 3
        assert not ends
        ring.retire("the test is over")
        second.finish()
        first.finish()
        assert sorted(ends) == ["first", "second"], "each end is told once"
        assert first.lost is second.lost is None
        ring.close()


@pytest.mark.parametrize("slots", [2, 3, 8])
def test_jobs_one_after_the_other_bring_their_own_bytes(tmp_path: Path, slots: int) -> None:
    """Each begins when the last turn of the former one is on its way; only the last ones are waited for."""
    engine = device(tmp_path, slots=slots, slot_bytes=CHUNK)
    sizes = [3, 1, 2, 1, 4, 2]
    ids = slot_ids(np.random.default_rng(3).permutation(BLOCKS)[: 13 * PER_CHUNK].reshape(13, -1), BLOCKS)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        for way in Direction:
            ends: list[int] = []
            jobs, at = [], 0
            for number, size in enumerate(sizes):
                grant = f"{way}{number}".encode()
                here = [(0, (at + n) * CHUNK) for n in range(size)]
                # One of them is for the other direction: nothing of it is moved.
                other = Direction.LOAD if way is Direction.STORE else Direction.STORE
                rig.grant(grant, other if number == 3 else way, here, CHUNK)
                made = RingJob(group=0, grant=grant, ids=ids[at : at + size], chunks=range(size))
                made.over = partial(ends.append, number)
                jobs.append(made)
                at += size
            was = [expected(engine, row) for row in ids]
            if way is Direction.LOAD:
                engine.storages[0][:] = 0xAA

            for made in jobs:
                ring.begin(way, made, soon())
            for made in reversed(jobs):
                made.finish()

            assert [made.lost for made in jobs] == [{0} if number == 3 else set() for number in range(6)]
            assert sorted(ends) == [*range(6)]
            for number, row in enumerate(ids):
                bytes_there = (
                    rig.bytes_at(0, number * CHUNK, CHUNK) if way is Direction.STORE else expected(engine, row)
                )
                kept = b"\xdd" * CHUNK if way is Direction.STORE else b"\xaa" * CHUNK
                assert bytes_there == (kept if number == 6 else was[number])
        ring.close()


def test_wrong_chunks_of_a_load_are_asked_for_again_beside_the_next_one(tmp_path: Path) -> None:
    engine = device(tmp_path, slots=2, slot_bytes=4 * CHUNK)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        good = (XXH3, checksum(b"\xdd" * CHUNK, ChecksumKind.XXH3))
        rig.grant(b"l", Direction.LOAD, places(8), CHUNK, [good] * 8)
        rig.grant(b"m", Direction.LOAD, places(8), CHUNK)
        for chunk in (1, 5, 6):
            rig.spoil(0, chunk * CHUNK + 17)
        first = job(8, b"l")
        second = RingJob(group=0, grant=b"m", ids=slot_ids(np.arange(4).reshape(1, -1), BLOCKS), chunks=[0])
        first.ids = slot_ids(np.arange(8, 40).reshape(8, -1), BLOCKS)

        ring.begin(Direction.LOAD, first, soon())
        ring.begin(Direction.LOAD, second, soon())
        second.finish()
        first.finish()

        assert (first.lost, first.wrong) == ({1, 5, 6}, {1, 5, 6})
        assert second.lost == set()
        assert expected(engine, first.ids[0]) == expected(engine, second.ids[0]) == b"\xdd" * CHUNK
        ring.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_the_time_of_a_former_job_counts_while_the_next_one_is_begun(tmp_path: Path, direction: Direction) -> None:
    engine = device(tmp_path, slots=2, slot_bytes=CHUNK)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", direction, places(12), CHUNK)
        (tmp_path / "ring.stall").touch()
        first, second = job(1), job(12)

        ring.begin(direction, first, time.monotonic() + 0.3)
        ring.begin(direction, second, time.monotonic() + 600)

        assert first.lost is second.lost is None
        assert ring.retired
        assert first.is_over
        assert second.is_over
        ring.close()


def _ignoring_the_end(ring: EngineRing, stored: RingJob) -> None:
    with suppress(RingRetiredError):
        ring.store(stored, soon())


@pytest.mark.behaviour("D030")
def test_a_load_that_waits_holds_no_store_up(tmp_path: Path) -> None:
    engine = device(tmp_path, slot_bytes=CHUNK)
    wait, reached, go = engine.wait, threading.Event(), threading.Event()

    def slow(direction: Direction, slot: int) -> None:
        if direction is Direction.LOAD:
            reached.set()
            go.wait(PATIENCE_S)
        wait(direction, slot)

    engine.wait = slow  # type: ignore[method-assign]
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"in", Direction.LOAD, places(8), CHUNK)
        rig.grant(b"out", Direction.STORE, [(0, 500_000 + n * CHUNK) for n in range(8)], CHUNK)
        ids = slot_ids(np.arange(64).reshape(16, PER_CHUNK), BLOCKS)
        result: list[frozenset[int]] = []
        loads = RingJob(group=0, grant=b"in", ids=ids[:8], chunks=range(8))
        thread = threading.Thread(target=lambda: result.append(ring.load(loads, soon())))
        thread.start()
        assert reached.wait(PATIENCE_S)

        assert ring.store(RingJob(group=0, grant=b"out", ids=ids[8:], chunks=range(8)), soon()) == frozenset()

        assert not result, "the load still waits"
        go.set()
        thread.join(PATIENCE_S)
        assert result == [frozenset()]
        ring.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_a_stalled_mover_costs_a_deadline_and_the_ring(tmp_path: Path, direction: Direction) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", direction, places(12), CHUNK)
        (tmp_path / "ring.stall").touch()
        move = ring.store if direction is Direction.STORE else ring.load

        with pytest.raises(RingRetiredError, match=direction):
            move(job(12), time.monotonic() + 0.3)

        assert ring.retired
        with pytest.raises(RingRetiredError):
            ring.store(job(1), soon())
        ring.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_a_failed_device_ends_the_mover_and_the_ring(tmp_path: Path, direction: Direction) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", direction, places(12), CHUNK)
        (tmp_path / "ring.fail").touch()
        move = ring.store if direction is Direction.STORE else ring.load

        with pytest.raises(RingRetiredError):
            move(job(12), soon())
        rig.until(lambda: rig.mover.state is MoverState.REAPED)

        assert rig.mover.reason == "an illegal address"
        ring.close()


def test_a_killed_mover_is_noticed_at_once(tmp_path: Path) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        rig.mover.kill("upgrade")

        with pytest.raises(RingRetiredError):
            ring.store(job(12), soon())

        rig.until(lambda: rig.mover.state is MoverState.REAPED)
        assert rig.mover.reason == "upgrade"
        ring.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_mover_that_dies_or_stops_at_any_time_leaves_whole_chunks_or_none(
    tmp_path: Path, seed: int, sign: signal.Signals
) -> None:
    """What a job reports as moved is there; what it does not may be anything, and no kernel runs after its end."""
    engine = device(tmp_path, slot_bytes=CHUNK)
    with MoverRig(tmp_path, engine.ring) as rig:
        ring = rig.ready().join(engine)
        names = itertools.count()
        thread = threading.Timer(0.002 * seed, lambda: os.kill(rig.mover.pid, sign))
        thread.start()

        def store_and_check() -> None:
            grant = str(next(names)).encode()
            rig.grant(grant, Direction.STORE, places(12), CHUNK)
            rig.regions[0].write_bytes(b"\xdd" * (1 << 20))
            assert ring.store(job(12, grant), time.monotonic() + 0.5) == frozenset()
            for number, (region, offset) in enumerate(places(12)):
                assert rig.bytes_at(region, offset, CHUNK) == expected(engine, job(12).ids[number])

        with pytest.raises(RingRetiredError):
            for _ in iter(store_and_check, ring):
                pass

        ring.close()
        launches = engine.launches
        rig.mover.kill("the test says so")
        rig.until(lambda: rig.mover.state is MoverState.REAPED)
        thread.join()
        assert engine.launches == launches


def test_only_the_secret_and_the_rings_number_join(tmp_path: Path) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring) as rig:
        rig.ready()
        with pytest.raises(RingRetiredError):
            rig.join(engine, secret=b"x" * 16)
        engine.ring = make_ring(tmp_path / "ring", 3, 2 * CHUNK, generation=1)
        with pytest.raises(RingRetiredError):
            rig.join(engine)


def test_nobody_listens_there(tmp_path: Path) -> None:
    with pytest.raises(RingRetiredError, match="cannot be joined"):
        EngineRing(device(tmp_path), f"unix:{tmp_path / 'none'}", b"s" * 16, soon())


@pytest.mark.parametrize("address", [f"tcp:{'a' * 64}.test:1", "tcp:127.0.0.1:", "tcp:[::1:7410"])
def test_what_cannot_be_an_address(tmp_path: Path, address: str) -> None:
    with pytest.raises(RingRetiredError, match="cannot be joined"):
        EngineRing(device(tmp_path), address, b"s" * 16, soon())


def test_a_mover_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring, command=("sleep", "60"), limits=MoverLimits(start_s=0.05)) as rig:
        rig.until(lambda: rig.mover.state is MoverState.REAPED)
    assert rig.mover.reason == "it did not answer in time"


def test_an_unanswered_revoke_ends_the_mover(tmp_path: Path) -> None:
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring, limits=MoverLimits(revoke_s=0.2)) as rig:
        ring = rig.ready().join(engine)
        rig.grant(b"g", Direction.STORE, places(2), CHUNK)
        (tmp_path / "ring.stall").touch()

        def store() -> None:
            with pytest.raises(RingRetiredError):
                ring.store(job(2), soon())

        thread = threading.Thread(target=store)
        thread.start()
        rig.until(lambda: rig.bytes_at(0, 0, 1) != b"\xdd")

        rig.mover.revoke(b"g", time.monotonic())
        rig.until(lambda: rig.mover.state is MoverState.REAPED)
        thread.join(PATIENCE_S)

        assert not rig.revoked
        assert ring.retired
        ring.close()


def test_the_mover_has_another_number_than_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpool.transfer.mover import supervision

    numbers: list[int] = []
    start = supervision._start

    def spying(*arguments: object) -> object:
        process = start(*arguments)  # type: ignore[arg-type]
        numbers.append(process.pid)
        return process

    class Same(int):
        def __eq__(self, other: object) -> bool:
            return len(numbers) == 1

        __hash__ = int.__hash__

    monkeypatch.setattr(supervision, "_start", spying)
    engine = device(tmp_path)
    with MoverRig(tmp_path, engine.ring, client_pid=Same(1)) as rig:
        rig.ready()
        assert len(numbers) == 2
        assert rig.mover.pid == numbers[1]


def test_a_ring_takes_no_more_than_there_is() -> None:
    assert slots_that_fit(10_000, 1_000, 4, 1_000) == 4
    assert slots_that_fit(7_500, 1_000, 4, 1_000) == 3
    assert slots_that_fit(4_900, 1_000, 4, 1_000) == 0
    assert slots_that_fit(0, 1_000, 4, 1_000) == 0
