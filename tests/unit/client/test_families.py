# SPDX-License-Identifier: Apache-2.0
"""Which of a name's addresses, of either family, the client tries."""

import pytest

from kvpool.client.names import Names
from kvpool.client.socket import Connection, Door

CONNECT_S = 1.0


@pytest.fixture
def door():
    made = Door(Names(lambda _: ("192.0.2.1", "2001:db8::1")))
    yield made
    made.close()


def family(door, address, *, heard=False):
    connection: Connection = door.connect(address, "", CONNECT_S)
    connection.heard = heard
    connection.close()
    return 6 if connection.six else 4


def test_a_name_that_does_not_answer_is_tried_in_the_other_family(door):
    assert [family(door, "tcp://name.invalid:1") for _ in range(4)] == [4, 6, 4, 6]


@pytest.mark.parametrize("fails_first", [0, 1])
def test_a_name_that_answered_stays_in_its_family(door, fails_first):
    for _ in range(fails_first):
        family(door, "tcp://name.invalid:1")

    found = [family(door, "tcp://name.invalid:1", heard=True) for _ in range(3)]

    assert found == [6 if fails_first else 4] * 3
    assert family(door, "tcp://name.invalid:2") == found[0], "its other port is reached in the same way"


@pytest.mark.parametrize(
    ("address", "expected"), [("tcp://192.0.2.1:1", 4), ("tcp://[2001:db8::1]:1", 6), ("ipc:///nowhere", 4)]
)
def test_an_address_says_its_own_family(door, address, expected):
    assert [family(door, address) for _ in range(3)] == [expected] * 3
