# SPDX-License-Identifier: Apache-2.0
"""TCP ports of this host that nobody uses."""

import socket
from contextlib import ExitStack

HOST = "127.0.0.1"


def free_range(count: int) -> int:
    """First of *count* ports that are free one after the other."""
    for first in range(20000, 60000, count):
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server((HOST, port)))
            except OSError:
                continue
            return first
    raise AssertionError("no range of free ports")
