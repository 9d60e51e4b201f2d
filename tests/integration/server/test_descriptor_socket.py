# SPDX-License-Identifier: Apache-2.0
"""The descriptor socket: who gets which segment, and how a death is noticed."""

import array
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.fakes.running_server import running_server

from kvpool.config import LeaseConfig
from kvpool.metrics.catalogue import series_key
from kvpool.model.identity import Mode, Role
from kvpool.model.slots import PLACEMENT, Disposition
from kvpool.wire import descriptors as d
from kvpool.wire import messages as m
from kvpool.wire.codec import placements_of

ROOT = Path(__file__).parents[3]
SHARD = 8192
ENDS_S = 10
QUICK = LeaseConfig(heartbeat_s=0.1, client_silent_s=0.5)


class Descriptors:
    """A client's end of the descriptor socket."""

    def __init__(self, server):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(5)
        self.sock.connect(server.config.listen.socket_path + d.SUFFIX)
        self._buffer = bytearray()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def ask(self, request):
        """Return (reply, descriptor or None); (None, None) when the server hung up."""
        self.sock.sendall(d.pack(request))
        return self.receive()

    def receive(self):
        fds = array.array("i")
        while (reply := d.take_reply(self._buffer)) is None:
            data, ancillary, _, _ = self.sock.recvmsg(8192, socket.CMSG_SPACE(4 * 4))
            for _, _, content in ancillary:
                fds.frombytes(content)
            if not data:
                return None, None
            self._buffer += data
        return reply, (fds[0] if fds else None)


@pytest.fixture
def server(tmp_path):
    with running_server(tmp_path) as running:
        yield running


def client_moved(server, **options):
    """A registered client-moved client and its attached descriptor connection."""
    client = server.connect()
    ticket = client.welcome(**options).ticket
    client.register(SHARD, modes=(Mode.CLIENT_MOVED,))
    segments = Descriptors(server)
    granted, _ = segments.ask(d.Attach(ticket=ticket))
    assert isinstance(granted, d.Granted)
    return client, segments, granted


@pytest.mark.behaviour("R024", "D107")
def test_a_client_writes_into_its_segment_and_another_reads_it_there(server):
    digest, data = os.urandom(32), os.urandom(SHARD)
    writer, segments, granted = client_moved(server)
    assert granted.boot_id == server.server.boot_id
    store_id = os.urandom(16)
    _, (raw,) = writer.ask(m.PrepareStore(request_id="r", store_id=store_id), digest)
    row = placements_of(raw, 1)[0]
    assert row["disposition"] == Disposition.WRITE
    region, fd = segments.ask(d.MapRegion(memory=int(row["memory"]), writable=True))
    assert (region.length, region.writable) == (granted.region_bytes, True)
    with mmap.mmap(fd, region.length) as mapped:
        mapped[int(row["offset"]) : int(row["offset"]) + SHARD] = data
    os.close(fd)
    assert writer.ask(m.CommitStore(store_id=store_id), b"\1", bytes(16))[0].stored == 1

    reader, their, _ = client_moved(server)
    lookup_id = os.urandom(16)
    assert reader.ask(m.Lookup(request_id="l", lookup_id=lookup_id), digest)[0].chunks == 1
    _, (raw, _, _) = reader.ask(m.PrepareRetrieve(lookup_id=lookup_id, end=1))
    row = placements_of(raw, 1)[0]
    assert row["disposition"] == Disposition.IN_PLACE
    region, fd = their.ask(d.MapRegion(memory=int(row["memory"])))
    with mmap.mmap(fd, region.length, prot=mmap.PROT_READ) as mapped:
        assert mapped[int(row["offset"]) : int(row["offset"]) + SHARD] == data
    with pytest.raises(OSError, match="denied"):
        mmap.mmap(fd, region.length)
    os.close(fd)
    assert PLACEMENT.itemsize == len(raw)

    for end in (writer, segments, reader, their):
        end.__exit__()


def test_a_client_that_cuts_its_segment_harms_its_own_loads_and_nothing_else(server):
    digest = os.urandom(32)
    writer, segments, _ = client_moved(server)
    store_id, lookup_id = os.urandom(16), os.urandom(16)
    _, (raw,) = writer.ask(m.PrepareStore(request_id="r", store_id=store_id), digest)
    row = placements_of(raw, 1)[0]
    _, fd = segments.ask(d.MapRegion(memory=int(row["memory"]), writable=True))
    assert writer.ask(m.CommitStore(store_id=store_id), b"\1", bytes(16))[0].stored == 1
    reader = server.connect()
    bulk = server.connect()
    bulk.ask(m.AttachBulk(ticket=reader.welcome().ticket))
    reader.register(SHARD, modes=(Mode.STREAMED,))
    assert reader.ask(m.Lookup(request_id="l", lookup_id=lookup_id), digest)[0].chunks == 1

    os.ftruncate(fd, 0)
    os.close(fd)

    answer, _ = bulk.ask(m.ReadChunk(lookup_id=lookup_id, chunk=0, offset=0, length=SHARD))
    assert answer.code == "unknown_lease"
    assert isinstance(reader.ask(m.Ping())[0], m.Pong)
    for end in (writer, segments, bulk, reader):
        end.__exit__()


@pytest.mark.behaviour("D107")
def test_regions_of_others_and_unused_ones_are_refused(server):
    client, segments, granted = client_moved(server)

    for region in (0, granted.regions - 1):
        assert segments.ask(d.MapRegion(memory=region, writable=True))[0].code == "role_forbidden"
    assert segments.ask(d.MapRegion(memory=granted.regions))[0].code == "invalid_range"

    client.close()
    segments.sock.close()


@pytest.mark.behaviour("D107")
def test_a_client_that_does_not_store_gets_no_writable_memory(server):
    writer, theirs, _ = client_moved(server)
    reader, segments, _ = client_moved(server, role=Role.CONSUMER)
    _, (raw,) = writer.ask(m.PrepareStore(request_id="r", store_id=os.urandom(16)), os.urandom(32))
    memory = int(placements_of(raw, 1)[0]["memory"])

    reply, fd = segments.ask(d.MapRegion(memory=memory, writable=True))
    assert (reply.code, fd) == ("role_forbidden", None)
    reply, fd = segments.ask(d.MapRegion(memory=memory))
    assert isinstance(reply, d.Region)
    os.close(fd)

    for end in (writer, theirs, reader, segments):
        end.__exit__()


@pytest.mark.behaviour("D107")
def test_a_streamed_client_maps_nothing(server):
    with server.connect() as client, Descriptors(server) as segments:
        ticket = client.welcome().ticket
        client.register(SHARD)
        client.ask(m.PrepareStore(request_id="r", store_id=bytes(16)), os.urandom(32))
        segments.ask(d.Attach(ticket=ticket))

        assert segments.ask(d.MapRegion(memory=0))[0].code == "role_forbidden"


def test_nothing_is_handed_out_before_attach(server):
    with Descriptors(server) as segments:
        assert segments.ask(d.MapRegion(memory=0))[0].code == "not_registered"
        assert segments.ask(d.Attach(ticket=bytes(16)))[0].code == "unknown_lease"


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\4\0\0\0junk", b"\1\0\0\0\xc1"])
def test_garbage_is_answered_and_ends_the_connection(server, data):
    with Descriptors(server) as segments:
        segments.sock.sendall(data)

        assert segments.receive()[0].code == "malformed"
        assert segments.receive() == (None, None)
    with server.connect() as c:
        assert c.welcome()


def test_requests_may_come_in_pieces_and_in_heaps(server):
    client, segments, granted = client_moved(server)
    heap = d.pack(d.MapRegion(memory=granted.regions)) * 3
    for byte in heap[:5]:
        segments.sock.sendall(bytes([byte]))
    segments.sock.sendall(heap[5:])

    assert [segments.receive()[0].code for _ in range(3)] == ["invalid_range"] * 3

    client.close()
    segments.sock.close()


CHILD = """
import signal, sys
from tests.fakes.raw_client import RawClient
from tests.integration.server.test_descriptor_socket import Descriptors, SHARD
from kvpool.model.identity import Mode
from kvpool.wire import descriptors as d, messages as m
path = sys.argv[1]
class Server:
    class config:
        class listen:
            socket_path = path
client = RawClient("ipc://" + path)
ticket = client.welcome().ticket
client.register(SHARD, modes=(Mode.CLIENT_MOVED,))
segments = Descriptors(Server)
segments.ask(d.Attach(ticket=ticket))
client.ask(m.PrepareStore(request_id="r", store_id=bytes(16)), bytes(32))
print("ready", flush=True)
signal.pause()
"""


MAPS_AND_HANGS_UP = CHILD.replace(
    'print("ready"', 'segments.ask(d.MapRegion(memory=0, writable=True))\nsegments.sock.close()\nprint("ready"'
)


def start_child(server, code=CHILD):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cacheserver")])}
    child = subprocess.Popen(
        [sys.executable, "-c", code, server.config.listen.socket_path], env=env, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"ready\n"
    return child


def wait_for(condition):
    """Poll the server until *condition* holds; each poll is a round trip through its loop."""
    over = threading.Event()
    timer = threading.Timer(ENDS_S, over.set)
    timer.start()
    try:
        while not condition():
            assert not over.is_set()
    finally:
        timer.cancel()


@pytest.mark.behaviour("D106")
@pytest.mark.parametrize("handle", ["from the socket", "from the number"])
def test_a_killed_client_is_noticed_and_its_slots_are_free(tmp_path, monkeypatch, handle):
    if handle == "from the number":
        monkeypatch.setattr("kvpool.transfer.pipe._SO_PEERPIDFD", 9999)
    with running_server(tmp_path) as server:
        child = start_child(server)
        assert server.numbers().used_bytes
        child.kill()
        child.wait()
        child.stdout.close()

        wait_for(lambda: server.counter(series_key("kvpool_dropped_clients_total", cause="died")) == 1)
        numbers = server.numbers()
        assert (numbers.clients, numbers.leases, numbers.used_bytes) == (0, 0, 0)
        with server.connect() as c:
            c.welcome()
            c.register(SHARD)
            assert c.ask(m.Lookup(request_id="r", lookup_id=bytes(16)), bytes(32))[0].chunks == 0


def test_a_stopped_client_is_not_taken_for_dead(tmp_path):
    with running_server(tmp_path, leases=QUICK) as server, server.connect() as silent:
        child = start_child(server)
        child.send_signal(signal.SIGSTOP)
        # A client without a process handle is dropped for its silence; the stopped one was silent for longer.
        silent.welcome()
        wait_for(lambda: server.counter(series_key("kvpool_dropped_clients_total", cause="silent")) == 1)

        assert server.numbers().clients == 1
        assert server.counter(series_key("kvpool_dropped_clients_total", cause="died")) == 0
        child.kill()
        child.wait()
        child.stdout.close()
        wait_for(lambda: server.numbers().clients == 0)


def test_end_of_the_connection_alone_is_silence_and_writes_stay_held(tmp_path):
    with running_server(tmp_path, leases=QUICK) as server:
        client, segments, _ = client_moved(server)
        client.ask(m.PrepareStore(request_id="r", store_id=bytes(16)), os.urandom(32))
        segments.sock.close()

        wait_for(lambda: server.counter(series_key("kvpool_dropped_clients_total", cause="silent")) == 1)

        # This process lives, so it may still write.
        assert server.numbers().used_bytes
        client.welcome()
        client.close()


@pytest.mark.behaviour("D106")
def test_the_death_of_a_client_that_was_given_up_before_gives_its_regions_back(tmp_path):
    with running_server(tmp_path, leases=QUICK) as server:
        clients = server.server.parts.engine._core.clients
        child = start_child(server, MAPS_AND_HANGS_UP)
        wait_for(lambda: server.counter(series_key("kvpool_dropped_clients_total", cause="silent")) == 1)
        assert server.ask(lambda: clients.granted(0)), "it lives, with what it mapped"
        child.kill()
        child.wait()
        child.stdout.close()

        wait_for(lambda: not server.ask(lambda: clients.granted(0)))


def test_goodbye_frees_at_once_what_the_client_could_write_to(server):
    client, segments, _ = client_moved(server)
    client.ask(m.PrepareStore(request_id="r", store_id=bytes(16)), os.urandom(32))

    client.ask(m.Unregister())

    assert server.numbers().used_bytes == 0
    assert segments.receive() == (None, None)
    client.close()
    segments.sock.close()
