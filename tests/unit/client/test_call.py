# SPDX-License-Identifier: Apache-2.0
"""Who listens to a call is told once, whichever of two threads comes first."""

from kvpool.client.call import Call
from kvpool.model import errors
from kvpool.wire.messages import Ping, Pong


class EndingWhileAsked(Call[Pong]):
    """The Link ends it in the moment between ``then``'s two steps, which another thread could do as well."""

    def done(self) -> bool:
        if not self._ended:
            self.finish(Pong(), ())
        return super().done()


def call() -> Call[Pong]:
    return Call(Ping(), (), 0.0)


def test_a_listener_is_told_at_the_end_and_once() -> None:
    told: list[str] = []
    waited = call()
    waited.then(lambda: told.append("waited"))
    assert not told

    waited.finish(Pong(), ())
    waited.fail(errors.DeadlineExceeded("too late"))

    assert told == ["waited"]


def test_a_listener_that_comes_late_is_told_at_once_and_once() -> None:
    told: list[str] = []
    ended = call()
    ended.finish(Pong(), ())

    ended.then(lambda: told.append("late"))

    assert told == ["late"]


def test_a_call_that_ends_while_somebody_begins_to_listen_tells_once() -> None:
    told: list[str] = []

    EndingWhileAsked(Ping(), (), 0.0).then(lambda: told.append("both"))

    assert told == ["both"]
