# SPDX-License-Identifier: Apache-2.0
"""Both address families, with a real server and real clients on loopback."""

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.clients import FakeEngine, digests, until
from tests.fakes.server_process import ServerProcess

from kvpool.server.addresses import dual_stack
from kvpool.server.keys import make_key

pytestmark = pytest.mark.skipif(not dual_stack(), reason="this machine has no IPv6")


class Place:
    """A server that listens at one address, and how clients reach its ports."""

    def __init__(self, folder: Path, host: str) -> None:
        self.public = make_key(str(folder / "key"))
        self.secret = folder / "secret"
        self.secret.write_text("a secret of this pool alone\n")
        self.secret.chmod(0o600)
        listen = {"socket_path": "", "tcp_host": host, "tcp_port": 0, "curve_key_file": str(folder / "key")}
        self.process = ServerProcess(
            folder,
            listen=listen | {"plain_bulk_port": 0},
            auth={"kind": "secret", "secret_file": str(self.secret)},
            http={"operations_host": host, "operations_port": 0},
        )

    def at(self, host: str) -> str:
        return f"tcp://{host}:{self.process.endpoints[0].rpartition(':')[2]}"


@pytest.fixture(scope="module", params=["*", "::1"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("families"), request.param)
    with made.process:
        until(lambda: made.process.endpoints, 30)
        yield made


@pytest.mark.timeout(60)
def test_bytes_travel_over_ipv6(place: Place) -> None:
    with FakeEngine(place.at("[::1]"), server_key=place.public, secret_file=str(place.secret)) as engine:
        engine.healthy()
        engine.blocks.fill(1)
        keys = digests(3)

        engine.store(keys)

        assert engine.worker_link.state.welcome.plain_bulk_port
        assert engine.load(engine.lookup(keys), 100) == frozenset()
        assert (engine.bytes_of(100, 3) == engine.bytes_of(0, 3)).all()


def test_the_operations_face_is_there_too(place: Place) -> None:
    operations = place.process.operations
    connection = http.client.HTTPConnection("::1", int(operations.rpartition(":")[2]), timeout=5)
    connection.request("GET", "/live")

    assert connection.getresponse().status == 200
    assert operations.startswith("["), "an address in brackets, as a URL wants it"
    connection.close()


@pytest.mark.timeout(60)
def test_an_address_of_the_old_family_is_told_as_it_was_given(tmp_path: Path) -> None:
    with Place(tmp_path, "127.0.0.1").process as process:
        told = until(lambda: process.endpoints, 30)

        assert all(address.startswith("tcp://127.0.0.1:") for address in told), told
