# SPDX-License-Identifier: Apache-2.0
"""A client, its servers and a slow name service, in mount and network namespaces of their own.

    unshare --mount --net python -m tests.fakes.slow_names FOLDER DELAY_S

Prints how long the client took to a session, in seconds from the moment at which a server was ready: at first, after a
kill, and after its server froze for ever and the name went to another address. -1 if it did not come.
"""

import json
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

from tests.fakes.clients import until
from tests.fakes.server_process import ServerProcess

from kvpool.client.link import Link
from kvpool.config import ClientConfig
from kvpool.model.identity import ClientKind
from kvpool.server.keys import make_key

NAME = "servers.test"
PORT = 7410
PATIENCE_S = 15.0
_HEAD = struct.Struct(">HHHHHH")
_A, _NO_ERROR, _LIFE_S = 1, 0x8180, 0


class NameService:
    """Tells every question's A record ``address``, each after some seconds."""

    def __init__(self, delay_s: float) -> None:
        self.address = "127.0.0.1"
        self._delay_s = delay_s
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(512)
            threading.Timer(self._delay_s, lambda q=query, s=sender: self._socket.sendto(self._reply(q), s)).start()

    def _reply(self, query: bytes) -> bytes:
        question = query[_HEAD.size : query.index(b"\0", _HEAD.size) + 5]
        (kind,) = struct.unpack_from(">H", question, len(question) - 4)
        record = struct.pack(">HHHIH", 0xC00C, _A, 1, _LIFE_S, 4) + socket.inet_aton(self.address)
        record = record if kind == _A else b""
        return _HEAD.pack(_HEAD.unpack_from(query)[0], _NO_ERROR, 1, bool(record), 0, 0) + question + record


class Place:
    """Servers of one pool and one client of theirs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._public = make_key(str(folder / "key"))
        self._secret = folder / "secret"
        self._secret.write_text("a secret of this pool alone\n")
        self._secret.chmod(0o600)

    def server(self, host: str) -> ServerProcess:
        folder = self._folder / host
        folder.mkdir()
        key = str(self._folder / "key")
        listen = {"socket_path": "", "tcp_host": host, "tcp_port": PORT, "curve_key_file": key}
        return ServerProcess(folder, listen=listen, auth={"kind": "secret", "secret_file": str(self._secret)})

    def link(self) -> Link:
        address, secret = f"tcp://{NAME}:{PORT}", str(self._secret)
        config = ClientConfig(server=address, server_key=self._public, secret_file=secret, connect_s=1.0, request_s=1.0)
        return Link(config, ClientKind.PROBE)


def come_back(link: Link, server: ServerProcess) -> float:
    """Wait for the server, then for the client; returns how long the latter took."""
    until(lambda: server.endpoints, 30)
    ready_s = monotonic()
    return monotonic() - ready_s if link.wait_healthy(PATIENCE_S) else -1.0


def main(folder: Path, delay_s: float) -> dict[str, float]:
    names, place = NameService(delay_s), Place(folder)
    link = place.link()
    with place.server("127.0.0.1") as server, place.server("127.0.0.2") as other:
        until(lambda: other.endpoints, 30)
        link.start()
        found = {"first_s": come_back(link, server)}
        server.kill()
        until(lambda: not link.state.healthy)
        (server.folder / "server.log").unlink()
        server.start()
        found["again_s"] = come_back(link, server)
        server.stop()
        names.address = "127.0.0.2"
        until(lambda: not link.state.healthy)
        found["elsewhere_s"] = come_back(link, other)
        link.close(0.2)
    return found


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    resolver = Path(sys.argv[1]) / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\n")
    subprocess.run(["mount", "--bind", resolver, "/etc/resolv.conf"], check=True)
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), float(sys.argv[2]))))
