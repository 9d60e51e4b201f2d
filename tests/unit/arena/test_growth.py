# SPDX-License-Identifier: Apache-2.0
import os
import threading

from kvpool.arena.growth import Growth


class Endless:
    """A segment that never is whole, and tells when it is worked at."""

    def __init__(self) -> None:
        self.worked = threading.Event()

    def grow(self, length: int) -> int:
        self.worked.set()
        return length

    def touch(self, _: int) -> int:
        raise AssertionError("nothing is touched before everything is reserved")


def test_stop_ends_threads_in_the_middle_of_their_work() -> None:
    segments = [Endless(), Endless()]
    growth = Growth(segments, 2)  # type: ignore[arg-type]
    for segment in segments:
        assert segment.worked.wait(10)
    assert growth.running
    assert not growth.join(0)

    growth.stop()
    growth.stop()
    assert not growth.running
    assert growth.failure == ""


class Looking:
    """A segment that notes how its thread is scheduled."""

    def __init__(self) -> None:
        self.nice: list[int] = []

    def grow(self, _: int) -> int:
        self.nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return 0

    touch = grow


def test_growing_stands_back_for_those_who_wait_for_an_answer() -> None:
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    segment = Looking()

    assert Growth([segment], 1).join(10)  # type: ignore[list-item]

    assert all(nice > own for nice in segment.nice)
    assert len(segment.nice) == 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own, "the thread alone is meant"
