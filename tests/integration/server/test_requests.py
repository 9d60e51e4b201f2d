# SPDX-License-Identifier: Apache-2.0
"""Every request over a real socket: its answer, its order, its refusals."""

import os

import numpy as np
import pytest
from tests.fakes.raw_client import NAMESPACE, error_code
from tests.fakes.running_server import running_server

from kvpool.config import LeaseConfig, LimitConfig
from kvpool.metrics.catalogue import series_key
from kvpool.model.identity import GroupKind, GroupSpec, Mode, Role
from kvpool.model.slots import Disposition
from kvpool.server.bulk import most_frames
from kvpool.wire import messages as m
from kvpool.wire.codec import encode_request, placements_of

SHARD = 8192


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("requests")) as running:
        yield running


@pytest.fixture
def client(server):
    with server.connect() as c:
        c.welcome()
        yield c
        c.ask(m.Unregister())


@pytest.fixture
def bulk(server, client):
    with server.connect() as b:
        ticket = client.welcome().ticket
        client.register(SHARD)
        b.ask(m.AttachBulk(ticket=ticket))
        yield b


def ident():
    return os.urandom(16)


def store(client, bulk, digests, data, request_id="store"):
    """Store one chunk for each 32 bytes of *digests*; returns the dispositions."""
    store_id, count = ident(), len(digests) // 32
    _, (raw,) = client.ask(m.PrepareStore(request_id=request_id, store_id=store_id), digests)
    rows = placements_of(raw, count)
    for chunk in np.flatnonzero(rows["disposition"] == Disposition.WRITE).tolist():
        piece = data[chunk * SHARD : (chunk + 1) * SHARD]
        for offset in range(0, SHARD, SHARD // 2):
            reply, _ = bulk.ask(
                m.WriteChunk(store_id=store_id, chunk=chunk, offset=offset), piece[offset : offset + SHARD // 2]
            )
            assert isinstance(reply, m.Wrote)
    _, (ends,) = client.ask(m.CommitStore(store_id=store_id), b"\1" * count, bytes(16 * count))
    return list(ends)


@pytest.mark.behaviour("R021", "R024", "R052", "D109")
def test_what_is_stored_is_found_and_read_back(client, bulk):
    digests, data = os.urandom(96), os.urandom(3 * SHARD)

    assert store(client, bulk, digests, data) == [Disposition.STORED] * 3
    lookup_id = ident()
    found, _ = client.ask(m.Lookup(request_id="r", lookup_id=lookup_id), digests)
    assert (found.chunks, found.coming, found.reason) == (3, 0, "all")
    readable, (raw, _, kinds) = client.ask(m.PrepareRetrieve(lookup_id=lookup_id, end=3))
    assert readable.chunks == 3
    assert set(placements_of(raw, 3)["disposition"]) == {Disposition.STREAM}
    read = b"".join(
        bulk.ask(m.ReadChunk(lookup_id=lookup_id, chunk=i, offset=o, length=4096))[1][0]
        for i in range(3)
        for o in (0, 4096)
    )
    assert read == data
    done, (ends,) = client.ask(m.CommitRetrieve(lookup_id=lookup_id, end=3), bytes(3))
    assert done.vouched == 3
    assert list(ends) == [Disposition.VOUCHED] * 3
    assert len(kinds) == 3


@pytest.mark.behaviour("R016", "R020")
def test_chunks_that_are_there_are_not_written_again(client, bulk):
    digests, data = os.urandom(32), os.urandom(SHARD)
    store(client, bulk, digests, data)

    prepared, (raw,) = client.ask(m.PrepareStore(request_id="again", store_id=ident()), digests)

    assert prepared.write == 0
    assert placements_of(raw, 1)["disposition"][0] == Disposition.PRESENT


@pytest.mark.behaviour("R053", "D019")
def test_freeing_is_idempotent_and_forgiving(client, bulk):
    digests = os.urandom(64)
    store(client, bulk, digests, os.urandom(2 * SHARD))
    lookup_id = ident()
    client.ask(m.Lookup(request_id="r", lookup_id=lookup_id), digests)

    freed = [client.ask(m.FreeLookup(lookup_id=lookup_id))[0].chunks for _ in range(2)]
    unknown, _ = client.ask(m.FreeLookup(lookup_id=ident()))

    assert freed == [2, 0]
    assert unknown.chunks == 0


def test_end_of_a_request_frees_its_lookup(client, bulk, server):
    digests = os.urandom(32)
    store(client, bulk, digests, os.urandom(SHARD))
    client.ask(m.Lookup(request_id="ends", lookup_id=ident()), digests)

    ended = [client.ask(m.EndRequest(request_id="ends"))[0].leases for _ in range(2)]

    assert ended == [1, 0]
    rows = server.ask(lambda: server.server.parts.engine.clients(0.0))
    assert [r.lookups for r in rows if r.client_id == client.client_id] == [0]


@pytest.mark.behaviour("R061")
def test_ping_and_stats(client, server):
    assert isinstance(client.ask(m.Ping())[0], m.Pong)

    statistics, _ = client.ask(m.Stats())

    assert statistics.server_id == "test"
    assert statistics.ready
    assert statistics.clients >= 1
    assert statistics.l1_bytes == server.config.l1.size_bytes
    assert statistics.counters[series_key("kvpool_clients", kind="worker")] >= 1


def test_clear_drops_the_callers_chunks(client, bulk):
    digests = os.urandom(32)
    store(client, bulk, digests, os.urandom(SHARD))

    cleared, _ = client.ask(m.Clear())

    assert cleared.chunks >= 1
    assert client.ask(m.Lookup(request_id="gone", lookup_id=ident()), digests)[0].chunks == 0


def test_every_reply_names_the_servers_boot(client, server):
    client.ask(m.Ping())
    assert client.envelope.boot_id == server.server.boot_id

    client.refusal(m.LookupStatus(lookup_id=ident()))
    assert client.envelope.boot_id == server.server.boot_id


@pytest.mark.behaviour("D083")
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"version_min": 99, "version_max": 100}, "version_mismatch"),
        ({"version_min": 0, "version_max": 0}, "version_mismatch"),
        ({"self_test": bytes(32)}, "self_test_failed"),
        ({"client_id": bytes(16)}, "malformed"),
    ],
)
def test_hello_that_cannot_be_is_refused(server, changes, code):
    with server.connect() as stranger:
        assert stranger.refusal(stranger.hello(**changes)).code == code
        assert stranger.refusal(m.Ping()).code == "not_registered"


def test_hello_of_a_newer_client_agrees_on_our_version(server):
    with server.connect() as newer:
        reply, _ = newer.ask(newer.hello(version_max=7), version=7)

        assert reply.version == 1


REQUESTS = [
    m.Renew(credential=""),
    m.Unregister(),
    m.LookupStatus(lookup_id=bytes(16)),
    m.FreeLookup(lookup_id=bytes(16)),
    m.PrepareRetrieve(lookup_id=bytes(16), end=1),
    m.ReadChunk(lookup_id=bytes(16), chunk=0, offset=0, length=1),
    m.EndRequest(request_id="r"),
    m.Clear(),
    m.Stats(),
    m.Ping(),
]


@pytest.mark.behaviour("D007", "D050")
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_nobody_is_served_before_hello(server, request_):
    with server.connect() as stranger:
        assert stranger.refusal(request_).code == "not_registered"


@pytest.mark.parametrize(
    "request_",
    [
        m.Lookup(request_id="r", lookup_id=bytes(16)),
        m.PrepareStore(request_id="r", store_id=bytes(16)),
    ],
    ids=lambda r: type(r).__name__,
)
def test_nothing_is_cached_before_register(server, request_):
    with server.connect() as early:
        early.welcome()

        assert early.refusal(request_, bytes(32)).code == "not_registered"


@pytest.mark.behaviour("R011")
@pytest.mark.parametrize(
    ("request_", "frames", "code"),
    [
        (m.Lookup(request_id="r", lookup_id=bytes(16)), [], "malformed"),
        (m.Lookup(request_id="r", lookup_id=bytes(16)), [b"x" * 31], "invalid_range"),
        (m.Lookup(request_id="r", lookup_id=bytes(16)), [bytes(32), bytes(32)], "malformed"),
        (m.Lookup(request_id="r", lookup_id=bytes(16)), [bytes(32 * 513)], "limit_exceeded"),
        (m.Lookup(request_id="r", lookup_id=bytes(16), shards=(7,)), [bytes(32)], "invalid_range"),
        (m.PrepareStore(request_id="r", store_id=bytes(16), group=5), [bytes(32)], "invalid_range"),
        (m.PrepareStore(request_id="r", store_id=bytes(16), shard=7), [bytes(32)], "invalid_range"),
        (m.LookupStatus(lookup_id=bytes(16)), [], "unknown_lease"),
        (m.CommitStore(store_id=bytes(16)), [b"\1", bytes(16)], "unknown_lease"),
        (m.CommitStore(store_id=bytes(16)), [b"\1"], "malformed"),
        (m.PrepareRetrieve(lookup_id=bytes(16), end=1), [], "unknown_lease"),
        (m.Ping(), [b"surplus"], "malformed"),
        (m.Ping(), [b"surplus"] * 100, "malformed"),
        (m.Renew(credential="x"), [], None),
        (m.AttachBulk(ticket=bytes(16)), [], "unknown_lease"),
        (m.WriteChunk(store_id=bytes(16), chunk=0, offset=0), [b"x"], "malformed"),
        (m.ReadChunk(lookup_id=bytes(16), chunk=0, offset=0, length=1), [], "malformed"),
    ],
)
def test_wrong_requests_get_their_error(client, request_, frames, code):
    client.register(SHARD)

    reply, _ = client.ask(request_, *frames)

    assert isinstance(reply, m.Renewed) if code is None else error_code(reply) == code


@pytest.mark.parametrize(
    ("request_", "frames", "code"),
    [
        (m.WriteChunk(store_id=bytes(16), chunk=0, offset=0), [b"x"], "unknown_lease"),
        (m.WriteChunk(store_id=bytes(16), chunk=0, offset=0), [b""], "malformed"),
        (m.WriteChunk(store_id=bytes(16), chunk=0, offset=0), [], "malformed"),
        (m.WriteChunk(store_id=bytes(16), chunk=0, offset=0), [bytes((64 << 10) + 1)], "limit_exceeded"),
        (m.ReadChunk(lookup_id=bytes(16), chunk=0, offset=0, length=1), [], "unknown_lease"),
        (m.ReadChunk(lookup_id=bytes(16), chunk=0, offset=0, length=1 << 30), [], "limit_exceeded"),
        (m.Stats(), [], "malformed"),
        (m.Ping(), [], None),
    ],
)
def test_wrong_bulk_requests_get_their_error(bulk, request_, frames, code):
    reply, _ = bulk.ask(request_, *frames)

    assert isinstance(reply, m.Pong) if code is None else error_code(reply) == code


def test_pieces_out_of_order_are_refused(client, bulk):
    store_id = ident()
    client.ask(m.PrepareStore(request_id="r", store_id=store_id), os.urandom(32))

    assert bulk.refusal(m.WriteChunk(store_id=store_id, chunk=0, offset=4096), b"x").code == "invalid_range"


@pytest.mark.behaviour("D002", "D003")
def test_a_store_without_all_its_bytes_is_abandoned(client, bulk):
    store_id, digest = ident(), os.urandom(32)
    client.ask(m.PrepareStore(request_id="r", store_id=store_id), digest)
    bulk.ask(m.WriteChunk(store_id=store_id, chunk=0, offset=0), b"half")

    stored, (ends,) = client.ask(m.CommitStore(store_id=store_id), b"\1", bytes(16))

    assert (stored.stored, list(ends)) == (0, [Disposition.ABANDONED])
    assert client.ask(m.Lookup(request_id="r2", lookup_id=ident()), digest)[0].chunks == 0


@pytest.mark.parametrize(("role", "code"), [(Role.CONSUMER, "role_forbidden"), (Role.BOTH, None)])
def test_a_consumer_may_not_store(server, role, code):
    with server.connect() as client:
        client.welcome(role=role)
        client.register(SHARD)

        reply, _ = client.ask(m.PrepareStore(request_id="r", store_id=ident()), os.urandom(32))

        assert isinstance(reply, m.Prepared) if code is None else error_code(reply) == code


@pytest.mark.behaviour("R125")
def test_client_moved_is_chosen_on_a_shared_socket(client):
    assert client.register(SHARD, modes=(Mode.CLIENT_MOVED, Mode.STREAMED)).mode is Mode.CLIENT_MOVED
    assert client.register(SHARD, modes=(Mode.STREAMED, Mode.CLIENT_MOVED)).mode is Mode.STREAMED
    assert client.register(SHARD, modes=()).mode is Mode.STREAMED


def test_modes_that_this_server_cannot_do_are_refused_with_both_lists(client):
    groups = (GroupSpec(kind=GroupKind.FULL, shard_bytes=SHARD),)

    error = client.refusal(m.Register(namespace=NAMESPACE, groups=groups, shards=(0,), modes=(Mode.RING,)))

    assert error.code == "layout_refused"
    assert "ring" in str(error)
    assert "streamed" in str(error)


@pytest.mark.behaviour("D036")
def test_clients_are_limited(tmp_path):
    with running_server(tmp_path, limits=LimitConfig(clients=2)) as server:
        clients = [server.connect() for _ in range(3)]
        for c in clients[:2]:
            c.welcome()

        assert clients[2].refusal(clients[2].hello()).code == "busy"
        clients[0].ask(m.Unregister())
        assert clients[2].welcome()

        for c in clients:
            c.close()


def test_hello_again_is_the_same_client(server):
    with server.connect() as first, server.connect() as second:
        before = first.welcome()
        second.client_id = first.client_id
        after = second.welcome()

        assert before.ticket != after.ticket
        assert first.refusal(m.Ping()).code == "not_registered"
        assert second.refusal(m.AttachBulk(ticket=before.ticket)).code == "unknown_lease"


def test_another_client_on_the_same_connection_replaces_the_first(server):
    with server.connect() as c:
        c.welcome()
        dropped = server.counter(series_key("kvpool_dropped_clients_total", cause="replaced"))
        c.welcome(client_id=ident())

        assert server.counter(series_key("kvpool_dropped_clients_total", cause="replaced")) == dropped + 1


def test_a_connection_with_a_routing_id_of_its_own_is_not_heard(server):
    with server.connect(routing_id=b"chosen") as c:
        assert c.refusal(c.hello()).code == "malformed"


def test_a_request_whose_time_is_over_is_answered_so(client):
    assert client.refusal(m.Ping(), deadline_ms=0).code == "deadline_exceeded"


def test_a_release_is_done_even_when_it_is_late(client):
    reply, _ = client.ask(m.FreeLookup(lookup_id=ident()), deadline_ms=0)

    assert isinstance(reply, m.Freed)


@pytest.mark.behaviour("R079")
def test_answers_name_the_request_they_answer(client):
    numbers = [client.send(m.Ping()) for _ in range(50)]

    assert [client.receive()[0].request_id for _ in numbers] == numbers


def test_wrong_version_in_an_envelope_is_refused(client):
    assert client.refusal(m.Ping(), version=9).code == "version_mismatch"


def test_unknown_request_of_a_newer_client_is_answered(client):
    envelope, _ = encode_request(m.Envelope(1, 77, 1000), m.Ping())
    client.socket.send_multipart([envelope, b"\x81\xa4type\xa5blend"])

    got, reply, _ = client.receive()

    assert got.request_id == 77
    assert reply.code == "unknown_request"


@pytest.mark.behaviour("R126")
def test_silent_client_is_dropped_and_its_leases_are_freed(tmp_path):
    leases = LeaseConfig(heartbeat_s=0.1, client_silent_s=0.4)
    with running_server(tmp_path, leases=leases) as server, server.connect() as c, server.connect() as witness:
        c.welcome()
        c.register(SHARD)
        c.ask(m.PrepareStore(request_id="r", store_id=ident()), os.urandom(32))
        witness.welcome(kind="probe")
        lost = series_key("kvpool_dropped_clients_total", cause="silent")

        while not server.counter(lost):
            witness.ask(m.Ping())

        assert c.refusal(m.Ping()).code == "not_registered"
        assert isinstance(witness.ask(m.Ping())[0], m.Pong)
        assert server.numbers().clients == 1


def test_in_flight_requests_are_limited(tmp_path):
    limits = LimitConfig(in_flight=2)
    with running_server(tmp_path, limits=limits) as server, server.connect() as writer, server.connect() as c:
        lookup_id, digest = ident(), os.urandom(32)
        for client in (writer, c):
            client.welcome()
            client.register(SHARD)
        writer.ask(m.PrepareStore(request_id="w", store_id=ident()), digest)
        assert c.ask(m.Lookup(request_id="r", lookup_id=lookup_id), digest)[0].coming == 1
        for _ in range(2):
            c.send(m.LookupStatus(lookup_id=lookup_id, wait_s=30))

        assert c.refusal(m.Ping()).code == "busy"
        assert isinstance(c.ask(m.FreeLookup(lookup_id=ident()))[0], m.Freed)


@pytest.mark.behaviour("R061")
def test_welcome_tells_limits_lease_times_and_the_descriptor_socket(server):
    with server.connect() as c:
        welcome = c.welcome()

    limits, leases = server.config.limits, server.config.leases
    assert welcome.limits == m.Limits(
        frame_bytes=limits.frame_bytes,
        chunks=limits.chunks,
        in_flight=limits.in_flight,
        bulk_window=limits.bulk_window,
        bulk_frames=most_frames(limits),
    )
    assert (welcome.lookup_lease_s, welcome.store_lease_s) == (leases.lookup_s, leases.store_s)
    assert welcome.heartbeat_s == leases.heartbeat_s
    assert welcome.chunk_tokens == server.config.chunk_tokens
    assert welcome.descriptor_socket == server.config.listen.socket_path + ".fd"
