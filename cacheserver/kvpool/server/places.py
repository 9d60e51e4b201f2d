# SPDX-License-Identifier: Apache-2.0
"""Where movers listen, and how they get the arena's memory."""

import secrets
import socket
from itertools import cycle
from pathlib import Path

from kvpool.config import ListenConfig, MoverConfig
from kvpool.model.errors import Busy
from kvpool.server.descriptors import Segments
from kvpool.server.sockets import Origin

__all__ = ["MoverPlaces", "memory_of"]


class MoverPlaces:
    """Names an address for each new mover: a socket beside the server's for a client that came over it, else TCP."""

    def __init__(self, listen: ListenConfig, mover: MoverConfig) -> None:
        """Remove what movers of a former server left; this server has taken its socket's path already."""
        self._listen = listen
        ports = range(mover.first_port, mover.first_port + mover.ports) if mover.first_port else range(1)
        self._count, self._ports = len(ports), cycle(ports)
        if listen.socket_path:
            path = Path(listen.socket_path)
            for left in path.parent.glob(f"{path.name}.m*"):
                left.unlink(missing_ok=True)

    def next(self, origin: Origin) -> str:
        """Return the address of the next mover; see ``kvpool.transfer.mover.messages.Start``."""
        if origin is Origin.UNIX:
            return f"unix:{self._listen.socket_path}.m{secrets.token_hex(4)}"
        return f"tcp:{self._listen.tcp_host}:{self._free_port()}"

    def _free_port(self) -> int:
        """Return the next port that nobody listens on: movers live as long as their clients. Any if all are taken."""
        for _ in range(self._count):
            port = next(self._ports)
            if _is_free(self._listen.tcp_host, port):
                break
        return port


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family, dualstack_ipv6=family == socket.AF_INET6).close()
    except OSError:
        return False
    return True


def memory_of(arena: Segments, memory: int) -> tuple[int, int]:
    """Return a new writable descriptor of the memory of that number, and its length.

    Raises:
        OSError: it is no part of the arena any more, or descriptors are short.
    """
    region = arena.region_of(memory)
    if region < 0:
        raise OSError(f"memory {memory} is no part of the arena any more")
    try:
        return arena.descriptor(region, writable=True), arena.region_bytes
    except Busy as e:
        raise OSError(str(e)) from e
