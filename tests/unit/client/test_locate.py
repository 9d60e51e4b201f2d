# SPDX-License-Identifier: Apache-2.0
"""One server found among those that a name, another server or a list tells of."""

import pytest

from kvpool.client.locate import Clues, Locator, at, sources
from kvpool.client.names import Names
from kvpool.config import ClientConfig
from kvpool.model.errors import ServerUnavailable
from kvpool.model.whereabouts import candidates, rendered

NAME = "tcp://kvpool-main-servers.models.svc:7410"
HOME = "tcp://kvpool-main-node.models.svc:7410"


def address(number):
    return f"tcp://192.0.2.{number}:7410"


class Pool:
    """Servers by address; None: one that does not answer."""

    def __init__(self, **servers):
        self.servers = {address(a.strip("_")): server_id for a, server_id in servers.items()}
        self.asked = []

    def identify(self, addresses):
        for address in addresses:
            self.asked.append(address)
            yield address, self.servers.get(address) or ServerUnavailable("silent")

    def locator(self, server_id):
        return Locator(at(NAME, server_id), self.identify, [lambda _: list(self.servers)])


def test_an_address_without_an_id_is_where_it_says():
    for place in ("ipc:///run/a.sock", "tcp://host:1"):
        assert Locator(place, lambda _: pytest.fail("asked"), [lambda _: pytest.fail("looked")]).find() == place


def test_the_server_of_that_id_is_found_and_asked_first_next_time():
    pool = Pool(_1="a", _2="b", _3="c")
    locator = pool.locator("c")

    assert locator.find() == address(3)
    assert pool.asked == [address(1), address(2), address(3)]
    assert locator.find() == address(3)
    assert pool.asked[3:] == [address(3)]


def test_a_replaced_server_is_found_where_it_is_now():
    pool = Pool(_1="a", _2="b")
    locator = pool.locator("b")
    locator.find()

    del pool.servers[address(2)]
    pool.servers[address(9)] = "b"
    assert locator.find() == address(9)

    pool.servers[address(9)] = "d"
    with pytest.raises(ServerUnavailable, match="none of the 2 servers"):
        locator.find()


def test_one_that_does_not_answer_does_not_hide_another():
    assert Pool(_1=None, _2="b").locator("b").find() == address(2)
    with pytest.raises(ServerUnavailable, match="silent"):
        Pool(_1=None, _2="b").locator("z").find()


def test_a_source_that_knows_nothing_does_not_hide_the_next_and_nobody_is_asked_twice():
    pool = Pool(_1="a", _2="b")

    def unknown(_):
        raise ServerUnavailable("no such name")

    locator = Locator(at("", "b"), pool.identify, [unknown, lambda _: [address(1)], lambda _: [address(1), address(2)]])

    assert locator.find() == address(2)
    assert pool.asked == [address(1), address(2)]
    pool.servers[address(2)] = "c"
    with pytest.raises(ServerUnavailable, match="none of the 2 servers that were asked is b; no such name"):
        locator.find()


def test_all_that_is_known_is_looked_into_in_order(tmp_path):
    looked = []

    def look_up(host):
        looked.append(host)
        return ["2001:db8::1", "192.0.2.2"]

    def ask(home, server_id):
        looked.append(f"{home}?{server_id}")
        return [address(3)]

    file = tmp_path / "servers"
    file.write_text(f"{address(4)}#b\n{address(8)}#c\n")
    config = ClientConfig(server=at(NAME, "b"), servers_file=str(file), servers=(address(5),))

    found = [tuple(source("b")) for source in sources(config, Clues("tcp://worker:1", HOME), look_up, ask)]

    named = (address(2), "tcp://[2001:db8::1]:7410")
    assert found == [("tcp://worker:1",), named, (address(3),), (address(4),), (address(5),)]
    assert looked == ["kvpool-main-servers.models.svc", f"{HOME}?b"]


def test_what_is_not_known_is_not_looked_into():
    """A worker's address that is the scheduler's own leads to the scheduler's own server."""

    def ask(*_):
        pytest.fail("asked")

    assert sources(ClientConfig(server=at("", "b")), Clues(), ask, ask) == []
    assert len(sources(ClientConfig(server=at("", "b")), Clues(HOME, HOME), ask, ask)) == 1


def test_a_list_that_is_not_there_yet_is_no_answer(tmp_path):
    config = ClientConfig(server=at("", "b"), servers_file=str(tmp_path / "none"))
    (look,) = sources(config, Clues(), lambda _: (), lambda *_: ())
    with pytest.raises(ServerUnavailable, match="none cannot be read"):
        look("b")

    (tmp_path / "none").write_text(rendered({"b": address(2)}))
    assert look("b") == (address(2),)


def test_a_list_names_servers_or_leaves_it_to_them():
    lines = ["", f"{address(1)}#a", address(2), f" {address(3)}#b ", f"{address(2)}", "#b"]

    assert candidates(lines, "b") == (address(3), address(2))
    assert candidates(lines, "c") == (address(2),)
    assert candidates(rendered({"b": address(1), "a": address(2)}).splitlines(), "a") == (address(2),)


def test_a_name_is_resolved_to_each_address_once():
    names = Names()
    assert names.addresses("127.0.0.1", 5) == ("127.0.0.1",)
    assert names.addresses("::1", 5) == ("::1",)
    for no_name in ("nowhere.invalid", f"{'a' * 64}.test", "a..b", "a\0b"):
        with pytest.raises(ServerUnavailable, match="cannot be resolved"):
            names.addresses(no_name, 30)
