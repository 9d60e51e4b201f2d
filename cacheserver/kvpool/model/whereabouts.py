# SPDX-License-Identifier: Apache-2.0
"""Lists of a pool's servers, one address a line: ``tcp://host:port#ID``, or without the id where it is not known.

A list may be old or wrong in every line: whoever reads it asks each address for its id before it is believed.
"""

from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["MARK", "bracketed", "candidates", "rendered"]

MARK: Final = "#"
"""Stands between an address and the id of its server."""


def bracketed(host: str) -> str:
    """Return *host* as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def rendered(addresses: Mapping[str, str]) -> str:
    """Return the list of addresses by their servers' ids, in a stable order."""
    return "".join(f"{address}{MARK}{server_id}\n" for server_id, address in sorted(addresses.items()))


def candidates(lines: Iterable[str], server_id: str) -> tuple[str, ...]:
    """Return the addresses of a list that may be those of *server_id*, those that say so first, each once."""
    parts = [line.strip().partition(MARK) for line in lines]
    named = [address for address, _, name in parts if address and name == server_id]
    unnamed = [address for address, _, name in parts if address and not name]
    return tuple(dict.fromkeys([*named, *unnamed]))
