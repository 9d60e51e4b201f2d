# SPDX-License-Identifier: Apache-2.0
"""Which client speaks on which connection."""

import pytest

from kvpool.model.errors import Busy, IdentityRefused, UnknownLease
from kvpool.model.identity import ClientKind
from kvpool.server.calls import Client
from kvpool.server.connections import Connections
from kvpool.server.sockets import Origin, Peer

A, B, C = (Peer(Origin.UNIX, name) for name in (b"a", b"b", b"c"))


def client(name=b"1", peer=A, now_s=0.0, tenant="t"):
    return Client(
        client_id=name * 16,
        kind=ClientKind.WORKER,
        tenant=tenant,
        label="",
        ticket=name * 16,
        peer=peer,
        seen_s=now_s,
        expires_s=None,
    )


@pytest.fixture
def connections():
    return Connections(most=2, silent_s=4.0)


def test_a_peer_is_nobody_before_its_hello(connections):
    assert connections.heard(A, 0.0) is None

    connections.add(one := client())

    assert connections.heard(A, 0.0) is one
    assert connections.heard(Peer(Origin.TCP, A.routing_id), 0.0) is None


def test_a_ticket_binds_a_bulk_connection(connections):
    connections.add(one := client())
    connections.attach(connections.by_ticket(one.ticket), B)

    assert connections.heard(B, 0.0) is one
    assert (connections.is_bulk(A), connections.is_bulk(B)) == (False, True)


def test_a_dropped_client_leaves_nothing_behind(connections):
    connections.add(one := client())
    connections.attach(one, B)
    for _ in range(2):
        connections.drop(one)

    assert connections.heard(A, 0.0) is connections.heard(B, 0.0) is None
    assert len(connections) == 0
    with pytest.raises(UnknownLease):
        connections.by_ticket(one.ticket)


def test_a_late_drop_does_not_touch_the_successor(connections):
    connections.add(before := client())
    after = client(peer=B)
    after.ticket = b"new" * 5 + b"!"
    assert connections.add(after) == [before]
    connections.drop(before)

    assert connections.find(after.client_id) is after
    assert connections.heard(A, 0.0) is None
    assert connections.heard(B, 0.0) is after


def test_an_id_of_another_tenant_is_not_taken_over(connections):
    connections.add(client(tenant="mine"))

    with pytest.raises(IdentityRefused):
        connections.check(b"1" * 16, "yours")
    connections.check(b"1" * 16, "mine")


def test_the_number_of_clients_is_limited_but_a_known_one_may_come_again(connections):
    connections.add(client(b"1", A))
    connections.add(client(b"2", B))

    connections.check(b"2" * 16, "t")
    with pytest.raises(Busy):
        connections.check(b"3" * 16, "t")


def look(connections, *times_s):
    """Look at several times; returns the ids found silent at the last one."""
    found = []
    for now_s in times_s:
        found = connections.silent(now_s)
    return [c.client_id[:1] for c in found]


def test_silence_is_noticed_when_it_lasted(connections):
    connections.add(client(b"1", A))
    connections.add(client(b"2", B))
    connections.heard(B, 2.0)

    assert look(connections, 1.0, 2.0, 3.0, 3.9) == []
    assert look(connections, 4.0) == [b"1"]
    assert look(connections, 6.0) == [b"1", b"2"]


def test_a_client_with_a_living_process_is_never_silent(connections):
    connections.add(one := client())
    one.watched = True

    assert look(connections, *range(100)) == []


def test_after_this_process_stood_still_everybody_gets_a_new_chance(connections):
    connections.add(client())

    assert look(connections, 0.0, 1.0, 100.0) == []
    assert look(connections, 101.0, 102.0, 103.0, 104.0) == [b"1"]
