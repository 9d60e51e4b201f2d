# SPDX-License-Identifier: Apache-2.0
"""A name service that is slow, wrong or down, and the client beside it."""

import socket
import threading

import pytest

from kvpool.client.names import Names, addresses_of
from kvpool.model.errors import ServerUnavailable

NAMED = "tcp://server.test:7410"


class Service:
    """Answers what it is told to, once it is told to."""

    def __init__(self):
        self.answer, self.go, self.asked = ("192.0.2.1",), threading.Event(), 0
        self.go.set()

    def __call__(self, name):
        assert name == "server.test"
        self.asked += 1
        self.go.wait(5)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def service():
    made = Service()
    yield made
    made.go.set()


@pytest.fixture
def now(monkeypatch):
    """A clock that the test moves."""
    time = [100.0]
    monkeypatch.setattr("kvpool.client.names.monotonic", lambda: time[0])
    return time


def numeric(names, *, failed=False, wait_s=5.0):
    return names.numeric(NAMED, failed=failed, wait_s=wait_s)


def test_what_has_no_name_is_asked_for_nowhere(service):
    names = Names(service)
    for address in ("ipc:///run/kvpool.sock", "tcp://192.0.2.7:1", "tcp://[2001:db8::7]:1"):
        assert names.numeric(address, failed=True, wait_s=0) == address
    assert not service.asked


def test_a_slow_answer_counts_for_a_later_attempt(service):
    names = Names(service)
    service.go.clear()
    for _ in range(3):
        with pytest.raises(ServerUnavailable, match="has not said yet"):
            numeric(names, wait_s=0.01)
    assert service.asked == 1, "one question at a time"

    service.go.set()

    assert numeric(names) == "tcp://192.0.2.1:7410"


@pytest.mark.parametrize("trouble", ["slow", socket.gaierror("down"), UnicodeError("no name")])
def test_without_the_name_service_its_last_answer_counts(service, now, trouble):
    names = Names(service)
    numeric(names)
    if trouble == "slow":
        service.go.clear()
    else:
        service.answer = trouble
    for _ in range(2):
        now[0] += 10

        assert numeric(names) == "tcp://192.0.2.1:7410"
    assert service.asked >= 2


def test_a_name_that_nobody_knows_is_said_to_be_unknown(service):
    service.answer = socket.gaierror("unknown")

    with pytest.raises(ServerUnavailable, match=r"server\.test cannot be resolved: unknown"):
        numeric(Names(service))


def test_another_answer_is_followed_and_one_that_fails_passed_over(service, now):
    names = Names(service)
    service.answer = ("192.0.2.1", "2001:db8::2")
    assert numeric(names) == "tcp://192.0.2.1:7410"
    assert numeric(names, failed=True) == "tcp://[2001:db8::2]:7410"
    assert numeric(names) == "tcp://[2001:db8::2]:7410", "it was heard of"
    assert numeric(names, failed=True) == "tcp://192.0.2.1:7410"

    service.answer = ("192.0.2.9",)
    now[0] += 10

    assert numeric(names) == "tcp://192.0.2.9:7410"


def test_the_systems_own_names_are_found():
    assert "127.0.0.1" in addresses_of("localhost")
    with pytest.raises((OSError, UnicodeError)):
        addresses_of("a..b")
