# SPDX-License-Identifier: Apache-2.0
"""One server found among those that a name lists."""

import pytest

from kvpool.client.locate import Locator, at, resolved
from kvpool.model.errors import ServerUnavailable

NAME = "tcp://kvpool-main-servers.models.svc:7410"


class Pool:
    """Servers by address; None: one that does not answer."""

    def __init__(self, **servers):
        self.servers = {f"tcp://{a.replace('_', '192.0.2.')}:7410": server_id for a, server_id in servers.items()}
        self.asked = []

    def identify(self, address):
        self.asked.append(address)
        if self.servers[address] is None:
            raise ServerUnavailable("silent")
        return self.servers[address]

    def resolve(self, host, port):
        assert (host, port) == ("kvpool-main-servers.models.svc", 7410)
        return list(self.servers)

    def locator(self, server_id):
        return Locator(at(NAME, server_id), self.identify, self.resolve)


def test_an_address_without_an_id_is_where_it_says():
    for address in ("ipc:///run/a.sock", "tcp://host:1"):
        assert Locator(address, lambda _: pytest.fail("asked"), lambda *_: pytest.fail("resolved")).find() == address


def test_the_server_of_that_id_is_found_and_asked_first_next_time():
    pool = Pool(_1="a", _2="b", _3="c")
    locator = pool.locator("c")

    assert locator.find() == "tcp://192.0.2.3:7410"
    assert pool.asked == ["tcp://192.0.2.1:7410", "tcp://192.0.2.2:7410", "tcp://192.0.2.3:7410"]
    assert locator.find() == "tcp://192.0.2.3:7410"
    assert pool.asked[3:] == ["tcp://192.0.2.3:7410"]


def test_a_replaced_server_is_found_where_it_is_now():
    pool = Pool(_1="a", _2="b")
    locator = pool.locator("b")
    locator.find()

    del pool.servers["tcp://192.0.2.2:7410"]
    pool.servers["tcp://192.0.2.9:7410"] = "b"
    assert locator.find() == "tcp://192.0.2.9:7410"

    pool.servers["tcp://192.0.2.9:7410"] = "d"
    with pytest.raises(ServerUnavailable, match="none of the 2 servers"):
        locator.find()


def test_one_that_does_not_answer_does_not_hide_another():
    assert Pool(_1=None, _2="b").locator("b").find() == "tcp://192.0.2.2:7410"
    with pytest.raises(ServerUnavailable, match="silent"):
        Pool(_1=None, _2="b").locator("z").find()


def test_a_name_is_resolved_to_each_address_once():
    assert resolved("127.0.0.1", 7410) == ["tcp://127.0.0.1:7410"]
    assert resolved("::1", 7410) == ["tcp://[::1]:7410"]
    with pytest.raises(ServerUnavailable, match=r"nowhere\.invalid"):
        resolved("nowhere.invalid", 1)
