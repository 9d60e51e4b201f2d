# SPDX-License-Identifier: Apache-2.0
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
