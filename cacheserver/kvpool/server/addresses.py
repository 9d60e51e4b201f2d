# SPDX-License-Identifier: Apache-2.0
"""``*`` as an address: every address of this machine, of both families where it has them."""

import errno
import socket
from collections.abc import Callable
from typing import Final

import msgspec

from kvpool.config import ServerConfig

__all__ = ["EVERY", "dual_stack", "with_addresses"]

EVERY: Final = "*"
_BOTH: Final = "::"
_OLD: Final = "0.0.0.0"  # noqa: S104 - what * means; the pod's network and identities decide who enters
_NO_FAMILY: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})


def dual_stack() -> bool:
    """Return True if this machine can listen on IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((_BOTH, 0))
    except OSError as e:
        if e.errno in _NO_FAMILY:
            return False
        raise
    return True


def with_addresses(config: ServerConfig, six: Callable[[], bool] = dual_stack) -> ServerConfig:
    """Return *config* with each ``*`` replaced by what it means here."""
    listen, http = config.listen, config.http
    if EVERY not in (listen.tcp_host, http.operations_host):
        return config
    every = _BOTH if six() else _OLD
    if listen.tcp_host == EVERY:
        listen = msgspec.structs.replace(listen, tcp_host=every)
    if http.operations_host == EVERY:
        http = msgspec.structs.replace(http, operations_host=every)
    return msgspec.structs.replace(config, listen=listen, http=http)
