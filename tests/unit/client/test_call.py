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


class SentWhileAsked(Call[Pong]):
    """The Link sends it in the moment between ``when_sent``'s two steps."""

    def __getattribute__(self, name: str) -> object:
        if name == "sent" and not self.__dict__["sent"]:
            self.note_sent()
        return super().__getattribute__(name)


def test_who_waits_until_it_is_sent_is_told_once_however_late() -> None:
    told: list[str] = []
    early, late, between = call(), call(), SentWhileAsked(Ping(), (), 0.0)
    early.when_sent(lambda: told.append("early"))
    assert not told
    assert not early.sent

    early.note_sent()
    late.note_sent()
    late.when_sent(lambda: told.append("late"))
    between.when_sent(lambda: told.append("between"))
    for each in (early, late, between):
        each.finish(Pong(), ())

    assert told == ["early", "late", "between"]
    assert early.sent
