# SPDX-License-Identifier: Apache-2.0
"""The client's smaller parts: gate, mappings, descriptors, lanes, ledger."""

import os
import re
import threading
from pathlib import Path
from time import monotonic

import pytest
from tests.fakes.clients import until
from tests.fakes.scripted_server import ScriptedServer

from kvpool.client.descriptors import Descriptors
from kvpool.client.gate import CopyGate
from kvpool.client.lane import Lane
from kvpool.client.ledger import Ledger
from kvpool.client.segments import Segments
from kvpool.model import errors

REGION = 1 << 16


# --- the gate


def test_the_gate_lets_in_only_the_open_session():
    gate = CopyGate(lambda: None)
    with pytest.raises(errors.StaleBoot), gate.copying(1):
        pass

    gate.open(1)
    with gate.copying(1):
        assert not gate.idle()
    with pytest.raises(errors.StaleBoot), gate.copying(2):
        pass
    assert gate.idle()


def test_the_last_copy_out_of_a_shut_gate_tells():
    told = []
    gate = CopyGate(lambda: told.append(gate.idle()))
    gate.open(1)

    with gate.copying(1), gate.copying(1):
        gate.shut()
        with pytest.raises(errors.StaleBoot), gate.copying(1):
            pass
        assert not told

    assert told == [True]


# --- mappings


@pytest.fixture
def memory():
    descriptor = os.memfd_create("region")
    os.ftruncate(descriptor, REGION)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def fetched(memory):
    """What was asked of the server, and Segments that ask."""
    asked = []

    def fetch(region, *, writable):
        asked.append((region, writable))
        flags = os.O_RDWR if writable else os.O_RDONLY
        return os.open(f"/proc/self/fd/{memory}", flags | os.O_CLOEXEC), REGION

    return asked, Segments(fetch)


def mappings():
    return [part for part in Path("/proc/self/smaps").read_text().split("\n7") if "memfd:region" in part]


def test_a_region_is_mapped_once_and_read_only_until_it_is_written(fetched):
    asked, segments = fetched

    first = segments.reading(7, 0, 16)
    segments.reading(7, 16, 16)
    assert asked == [(7, False)]
    assert first.readonly

    segments.writing(7, 0, 4)[:] = b"abcd"
    assert asked == [(7, False), (7, True)]
    assert bytes(first[:4]) == b"abcd"
    assert segments.reading(7, 0, 4).readonly


def test_mappings_are_not_inherited_by_a_fork_and_go_when_dropped(fetched):
    _, segments = fetched
    view = segments.writing(0, 0, 16)
    assert all(" dc" in part for part in mappings()), "VmFlags has dontcopy"
    assert len(mappings()) == 1

    segments.drop()
    assert len(mappings()) == 1, "a copy still has a view"
    view[:] = bytes(16)
    del view

    assert not mappings()


def resident_bytes(expected=1):
    found = [int(re.search(r"Rss: +(\d+) kB", mapping)[1]) << 10 for mapping in mappings()]
    assert len(found) == expected
    return min(found)


@pytest.mark.parametrize("way", ["reading", "writing"])
def test_the_pages_of_a_part_are_mapped_at_once_and_no_others(fetched, way):
    _, segments = fetched

    part = getattr(segments, way)(0, 3 * 4096 + 100, 2 * 4096)

    assert resident_bytes() == 3 * 4096
    assert bytes(part) == bytes(2 * 4096)


class Locks:
    """Locks of pages that a test may hold at ``gate`` or refuse."""

    def __init__(self):
        self.gate, self.entered, self.refuses = threading.Event(), threading.Event(), False
        self.gate.set()
        self.locked: dict[int, tuple[int, bool]] = {}

    def lock(self, address, length, *, writable):
        self.entered.set()
        assert self.gate.wait(30)
        if self.refuses:
            return False
        assert address not in self.locked
        self.locked[address] = (length, writable)
        return True

    def unlock(self, address):
        del self.locked[address]
        assert mappings(), "not unmapped before"


@pytest.fixture
def locks():
    return Locks()


@pytest.fixture
def lockable(fetched, locks):
    return Segments(fetched[1]._fetch, locks)


def test_pages_of_regions_are_locked_once_and_let_go_before_they_are_unmapped(lockable, locks):
    for _ in range(3):
        lockable.reading(7, 0, 16)
        lockable.writing(7, 16, 16)
    until(lambda: sorted(locks.locked.values()) == [(REGION, False), (REGION, True)])
    assert resident_bytes(2) == REGION

    lockable.drop()

    assert not locks.locked
    assert not mappings()


def test_locks_last_as_long_as_a_copy_does(lockable, locks):
    view = lockable.writing(7, 0, 16)
    until(lambda: locks.locked)

    lockable.drop()
    assert locks.locked
    view[:] = bytes(16)
    del view

    assert not locks.locked
    assert not mappings()


def test_a_region_is_used_while_its_pages_are_being_locked_and_dropping_waits(lockable, locks):
    locks.gate.clear()
    lockable.writing(7, 0, 4)[:] = b"abcd"
    assert locks.entered.wait(10)
    lockable.reading(8, 0, 4)

    dropping = threading.Thread(target=lockable.drop)
    dropping.start()
    until(lambda: not len(lockable))
    assert dropping.is_alive()
    assert mappings()
    locks.gate.set()
    dropping.join(10)

    assert not locks.locked, "the other one's were never locked"
    assert not mappings()


def test_pages_that_cannot_be_locked_are_used_all_the_same(lockable, locks):
    locks.refuses = True
    lockable.writing(7, 0, 4)[:] = b"abcd"
    assert locks.entered.wait(10)

    assert bytes(lockable.reading(7, 0, 4)) == b"abcd"
    lockable.drop()
    assert not mappings()


def test_a_fault_while_pages_are_locked_costs_those_alone(lockable, locks, caplog):
    real = locks.lock
    locks.lock = None
    lockable.writing(7, 0, 4)[:] = b"abcd"
    until(lambda: "locking mapped memory failed" in caplog.text)

    locks.lock = real
    lockable.writing(8, 0, 4)

    until(lambda: len(locks.locked) == 1)
    assert bytes(lockable.reading(7, 0, 4)) == b"abcd"
    lockable.drop()


@pytest.mark.parametrize(("offset", "length"), [(REGION, 1), (0, REGION + 1), (1 << 40, 8)])
def test_a_place_outside_of_its_region_is_refused(fetched, offset, length):
    with pytest.raises(errors.InvalidRange):
        fetched[1].reading(0, offset, length)


def test_a_region_shorter_than_promised_is_refused(memory):
    def fetch(region, *, writable):
        return os.dup(memory), REGION * 2

    segments = Segments(fetch)

    with pytest.raises(errors.ServerUnavailable):
        segments.reading(0, 0, 1)


# --- the descriptor socket


def test_descriptors_come_from_the_server_of_the_same_boot(tmp_path):
    with ScriptedServer(tmp_path) as server:
        path = server.path + ".fd"
        descriptors = Descriptors(path, bytes(16), server.boot_id, 1.0)
        descriptor, length = descriptors.fetch(0, writable=False)
        assert os.fstat(descriptor).st_size == length
        os.close(descriptor)
        descriptors.close()

        with pytest.raises(errors.StaleBoot):
            Descriptors(path, bytes(16), bytes(16), 1.0)


def test_a_server_that_is_gone_is_unavailable_also_on_the_descriptor_socket(tmp_path):
    with ScriptedServer(tmp_path) as server:
        descriptors = Descriptors(server.path + ".fd", bytes(16), server.boot_id, 1.0)
        server.stop()

        with pytest.raises(errors.ServerUnavailable):
            descriptors.fetch(0, writable=True)
        descriptors.close()
    with pytest.raises(errors.ServerUnavailable):
        Descriptors(str(tmp_path / "nothing"), bytes(16), bytes(16), 1.0)


# --- lanes


class Step:
    """Work that a test makes due."""

    def __init__(self, name, log):
        self.name, self.log, self.due = name, log, False
        self.early = False

    def due_in_s(self, _now_s):
        return 0.0 if self.due else 30.0

    def can_prepare(self):
        return self.early

    def prepare(self):
        self.early = False
        self.log.append(f"{self.name} prepared")
        if self.name == "raises":
            raise ZeroDivisionError("made up")

    def run(self):
        self.log.append(self.name)
        if self.name == "raises":
            raise ZeroDivisionError("made up")

    def settle(self):
        self.log.append(f"{self.name} settled")


def test_a_lane_runs_what_is_due_first_and_survives_exceptions(caplog):
    log: list[str] = []
    lane = Lane("lane", 10)
    waits, raises, goes = Step("waits", log), Step("raises", log), Step("goes", log)
    raises.due = goes.due = True
    for step in (waits, raises, goes):
        assert lane.add(step)
    until(lambda: len(log) == 4)

    waits.due = True
    lane.kick()

    until(lambda: len(log) == 6)
    assert [name for name in log if "settled" not in name] == ["raises", "goes", "waits"]
    assert lane.close() == []
    assert lane.join(5)
    assert not lane.add(goes)


def test_a_lane_prepares_what_waits_while_nothing_is_due(caplog):
    log: list[str] = []
    lane = Lane("lane", 10)
    busy, raises, first, second, third = (
        Slow("busy", log),
        *(Step(name, log) for name in ("raises", "first", "second", "third")),
    )
    assert lane.add(busy)
    assert busy.settling.wait(10)
    raises.early = first.early = third.early = second.early = second.due = True
    for step in (raises, first, second, third):
        assert lane.add(step)
    assert log == ["busy"], "not while it waits for moves"

    busy.over.set()
    until(lambda: len(log) == 7)
    assert lane.withdraw(lambda step: step is not third) == ([], [raises, first]), "what was begun goes on"
    first.due = True
    lane.kick()
    until(lambda: len(log) == 9)
    until(lambda: lane.withdraw(lambda step: step is first) == ([], []))

    assert log[1:4] == ["busy settled", "second", "second settled"], "what is due goes first"
    assert log[4:] == ["raises prepared", "first prepared", "third prepared", "first", "first settled"]
    assert lane.close() == [raises, third]
    assert lane.join(5)


def test_a_kick_wakes_no_lane_that_has_nothing_to_look_at():
    log: list[str] = []
    lane = Lane("lane", 10)
    step = Step("step", log)
    step.due = True
    assert lane.add(step)
    until(lambda: len(log) == 2)
    looks, real = [], lane._changed.notify
    lane._changed.notify = lambda: (looks.append(1), real())[1]

    for _ in range(10):
        lane.kick()

    assert looks == []
    assert lane.close() == []
    assert lane.join(5)


class Slow(Step):
    """Work that leaves moves under way until the test lets them end."""

    def __init__(self, name, log):
        super().__init__(name, log)
        self.due, self.settling, self.over = True, threading.Event(), threading.Event()

    def settle(self):
        self.settling.set()
        assert self.over.wait(10)
        super().settle()


def test_a_lane_begins_what_is_due_while_moves_of_the_former_are_under_way():
    log: list[str] = []
    lane = Lane("lane", 10)
    holds, first, second, third = Slow("holds", log), Slow("first", log), Slow("second", log), Slow("third", log)
    assert lane.add(holds)
    assert holds.settling.wait(10)
    for step in (first, second, third):
        assert lane.add(step)

    holds.over.set()

    assert first.settling.wait(10)
    assert log == ["holds", "holds settled", "first", "second"], "the second began before the first was waited for"
    assert lane.withdraw(lambda step: step is not third) == ([], [first, second])
    first.over.set()
    assert second.settling.wait(10)
    assert log[4:] == ["first settled", "third"]
    assert lane.close() == []
    assert not lane.join(0.01), "moves under way are waited for"
    second.over.set()
    third.over.set()
    assert lane.join(5)
    assert log[6:] == ["second settled", "third settled"]


def test_a_lane_is_bounded_and_gives_back_what_it_did_not_run():
    log: list[str] = []
    lane = Lane("lane", 2)
    steps = [Step(str(i), log) for i in range(4)]

    assert [lane.add(step) for step in steps] == [True, True, False, False]
    assert lane.withdraw(lambda step: step.name == "0") == ([steps[0]], [])
    assert lane.add(steps[2])
    assert lane.close() == [steps[1], steps[2]]
    assert lane.join(5)
    assert log == []


# --- the ledger


def test_the_ledger_counts_jobs_and_tells_each_end_once():
    ledger = Ledger()
    ledger.begin_store("a")
    ledger.begin_store("a")
    ledger.begin_load("b")
    ledger.end_reading("a")
    ledger.end_store("a")
    assert ledger.take() == ledger.take()
    assert ledger.has_stores("a")

    ledger.end_reading("a")
    assert not ledger.has_stores("a"), "its blocks are not read any more"
    assert not ledger.take().stored
    ledger.end_store("a")
    ledger.end_load("b", frozenset({3}))
    ended = ledger.take()

    assert (ended.stored, ended.loaded) == (frozenset({"a"}), {"b": frozenset({3})})
    assert not ledger.take().stored
    assert not ledger.has_stores("a")


def test_the_ledger_wakes_who_waits_for_an_end():
    ledger = Ledger()
    ledger.begin_store("a")
    ledger.begin_store("b")
    ledger.end_store("b")
    assert ledger.take(60).stored == frozenset({"b"}), "at once: it has ended already"
    threading.Timer(0.05, lambda: ledger.end_store("a")).start()

    assert ledger.take(60).stored == frozenset({"a"})
    assert not ledger.take(0.01).stored


def test_the_ledger_holds_under_many_threads():
    ledger = Ledger()
    stored: list[str] = []

    def run(number):
        for i in range(200):
            ledger.begin_store(f"{number}-{i}")
            ledger.end_store(f"{number}-{i}")

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    ends_s = monotonic() + 10
    while len(stored) < 800 and monotonic() < ends_s:
        stored += ledger.take().stored
    for thread in threads:
        thread.join(5)

    assert sorted(stored) == sorted(f"{n}-{i}" for n in range(4) for i in range(200))
