# SPDX-License-Identifier: Apache-2.0
"""What * means as an address, with and without IPv6."""

import pytest

from kvpool.config import HttpConfig, ListenConfig, ServerConfig
from kvpool.model.whereabouts import bracketed
from kvpool.server.addresses import with_addresses


@pytest.mark.parametrize(("six", "expected"), [(True, "::"), (False, "0.0.0.0")])
def test_every_address_is_that_of_both_families_where_there_are_both(six: bool, expected: str) -> None:
    config = ServerConfig(listen=ListenConfig(tcp_host="*"), http=HttpConfig(operations_host="*"))

    found = with_addresses(config, lambda: six)

    assert (found.listen.tcp_host, found.http.operations_host) == (expected, expected)


def test_other_addresses_stay_and_nobody_asks_about_families() -> None:
    def never() -> bool:
        raise AssertionError

    config = ServerConfig(listen=ListenConfig(tcp_host="fd00::1"), http=HttpConfig(operations_host=""))

    assert with_addresses(config, never) is config


def test_brackets_stand_around_colons_alone() -> None:
    assert [bracketed(h) for h in ("fd00::1", "192.0.2.1", "name")] == ["[fd00::1]", "192.0.2.1", "name"]
