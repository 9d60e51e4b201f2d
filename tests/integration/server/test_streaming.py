# SPDX-License-Identifier: Apache-2.0
"""Streamed bytes under load: windows, clients that do not read, waiting lookups, several clients at once."""

import os
import threading

import numpy as np
import pytest
from tests.fakes.clients import until
from tests.fakes.running_server import running_server

from kvpool.config import LimitConfig
from kvpool.metrics.catalogue import series_key
from kvpool.model.slots import Disposition
from kvpool.server.bulk import most_frames
from kvpool.wire import messages as m
from kvpool.wire.codec import placements_of

PIECE = 64 << 10
SHARD = 4 * PIECE
WAIT_S = 10


@pytest.fixture
def server(tmp_path):
    with running_server(tmp_path) as running:
        yield running


class Pair:
    """A registered client with its bulk connection."""

    def __init__(self, server, shard_bytes=SHARD):
        self.control, self.bulk = server.connect(), server.connect()
        ticket = self.control.welcome().ticket
        self.control.register(shard_bytes)
        self.bulk.ask(m.AttachBulk(ticket=ticket))

    def close(self):
        self.control.close()
        self.bulk.close()

    def store(self, digests, data, shard_bytes=SHARD):
        store_id, count = os.urandom(16), len(digests) // 32
        _, (raw,) = self.control.ask(m.PrepareStore(request_id="s", store_id=store_id), digests)
        write = np.flatnonzero(placements_of(raw, count)["disposition"] == Disposition.WRITE).tolist()
        for chunk in write:
            whole = data[chunk * shard_bytes : (chunk + 1) * shard_bytes]
            for offset in range(0, shard_bytes, PIECE):
                piece = whole[offset : offset + PIECE]
                assert isinstance(
                    self.bulk.ask(m.WriteChunk(store_id=store_id, chunk=chunk, offset=offset), piece)[0], m.Wrote
                )
        # A store of which nothing is to be written is over at once.
        if not write:
            return 0
        return self.control.ask(m.CommitStore(store_id=store_id), b"\1" * count, bytes(16 * count))[0].stored

    def load(self, digests, shard_bytes=SHARD):
        """Return the bytes of the prefix that is there, and whether all of it was vouched for."""
        lookup_id = os.urandom(16)
        found = self.control.ask(m.Lookup(request_id=lookup_id.hex(), lookup_id=lookup_id), digests)[0].chunks
        if not found:
            return b"", True
        self.control.ask(m.PrepareRetrieve(lookup_id=lookup_id, end=found))
        read = b"".join(
            self.bulk.ask(m.ReadChunk(lookup_id=lookup_id, chunk=c, offset=o, length=PIECE))[1][0]
            for c in range(found)
            for o in range(0, shard_bytes, PIECE)
        )
        done, _ = self.control.ask(m.CommitRetrieve(lookup_id=lookup_id, end=found), bytes(found))
        return read, done.vouched == found


@pytest.fixture
def pair(server):
    made = Pair(server)
    yield made
    made.close()


@pytest.mark.behaviour("R065", "D036", "D048")
def test_bytes_beyond_the_window_are_refused_and_may_be_sent_again(server, pair):
    """With the lanes held up, exactly the window's pieces are taken."""
    held, go = threading.Event(), threading.Event()
    window = server.config.limits.bulk_window
    lanes = server.server.parts.lanes
    submit = lanes.submit

    def hold(lane, copy):
        """Let no copy begin before the test says so."""
        run = copy.run

        class Held:
            done, call = copy.done, copy.call

            @staticmethod
            def run():
                held.set()
                assert go.wait(WAIT_S)
                run()

        submit(lane, Later(copy, Held.run))

    server.ask(lambda: setattr(lanes, "submit", hold))
    store_id = os.urandom(16)
    pair.control.ask(m.PrepareStore(request_id="s", store_id=store_id), os.urandom(64))
    places = [(c, o) for c in range(2) for o in range(0, SHARD, PIECE)]
    for chunk, offset in places[: window + 1]:
        pair.bulk.send(m.WriteChunk(store_id=store_id, chunk=chunk, offset=offset), bytes(PIECE))

    assert pair.bulk.receive()[1].code == "busy"
    assert held.wait(WAIT_S)
    # Control requests do not wait for any of it.
    assert isinstance(pair.control.ask(m.Ping())[0], m.Pong)
    go.set()
    assert all(isinstance(pair.bulk.receive()[1], m.Wrote) for _ in range(window))
    chunk, offset = places[window]
    assert isinstance(
        pair.bulk.ask(m.WriteChunk(store_id=store_id, chunk=chunk, offset=offset), bytes(PIECE))[0], m.Wrote
    )


def test_small_frames_may_be_more_but_neither_too_many_nor_too_many_bytes(server, pair):
    """With the lanes doing nothing."""
    limits, held = server.config.limits, []
    server.ask(lambda: setattr(server.server.parts.lanes, "submit", lambda _lane, copy: held.append(copy.size)))
    store_id = os.urandom(16)
    pair.control.ask(m.PrepareStore(request_id="s", store_id=store_id), os.urandom(32))
    small = 1024

    for number in range(most_frames(limits)):
        pair.bulk.send(m.WriteChunk(store_id=store_id, chunk=0, offset=number * small), bytes(small))
    until(lambda: server.ask(lambda: len(held)) == most_frames(limits))
    assert most_frames(limits) > limits.bulk_window
    pair.bulk.send(m.WriteChunk(store_id=store_id, chunk=0, offset=len(held) * small), bytes(small))

    assert pair.bulk.receive()[1].code == "busy"


class Later:
    """A copy whose work is replaced."""

    def __init__(self, copy, run):
        self._copy, self.run = copy, run

    def done(self, _later):
        self._copy.done(self._copy)


@pytest.mark.behaviour("D036")
def test_a_client_that_asks_and_does_not_read_fills_no_memory(server, pair):
    digest = os.urandom(32)
    pair.store(digest, os.urandom(SHARD))
    lookup_id = os.urandom(16)
    pair.control.ask(m.Lookup(request_id="r", lookup_id=lookup_id), digest)
    pair.control.ask(m.PrepareRetrieve(lookup_id=lookup_id, end=1))
    asked = 2000

    for _ in range(asked):
        pair.bulk.send(m.ReadChunk(lookup_id=lookup_id, chunk=0, offset=0, length=PIECE), deadline_ms=60_000)
    while not server.counter(series_key("kvpool_errors_total", code="busy")):
        pair.control.ask(m.Ping())

    clients = server.ask(lambda: [len(c.unread) for c in server.server.parts.connections])
    assert max(clients) <= 4 * server.config.limits.bulk_window
    assert isinstance(pair.control.ask(m.Ping())[0], m.Pong)


@pytest.mark.behaviour("D036")
def test_a_client_that_never_reads_is_dropped_and_counted(tmp_path):
    with running_server(tmp_path, limits=LimitConfig(in_flight=1)) as server, server.connect() as witness:
        deaf = server.connect()
        deaf.socket.rcvhwm = 1
        deaf.socket.disconnect(server.address)
        deaf.socket.connect(server.address)
        deaf.welcome()
        witness.welcome(kind="probe")
        unread = series_key("kvpool_dropped_clients_total", cause="unread")
        while not server.counter(unread):
            for _ in range(200):
                deaf.send(m.Stats())
            assert isinstance(witness.ask(m.Ping())[0], m.Pong)

        assert server.counter(unread) == 1
        deaf.close()


@pytest.mark.behaviour("R047", "D109")
def test_a_waiting_lookup_is_answered_when_another_client_commits(server, pair):
    digests, data = os.urandom(64), os.urandom(2 * SHARD)
    reader, store_id, lookup_id = Pair(server), os.urandom(16), os.urandom(16)
    pair.control.ask(m.PrepareStore(request_id="s", store_id=store_id), digests)
    found, _ = reader.control.ask(m.Lookup(request_id="r", lookup_id=lookup_id), digests)
    assert (found.chunks, found.coming) == (0, 2)
    reader.control.send(m.LookupStatus(lookup_id=lookup_id, wait_s=30), deadline_ms=30_000)
    for chunk in range(2):
        for offset in range(0, SHARD, PIECE):
            piece = data[chunk * SHARD + offset :][:PIECE]
            pair.bulk.ask(m.WriteChunk(store_id=store_id, chunk=chunk, offset=offset), piece)
    assert reader.control.receive(0) is None

    pair.control.ask(m.CommitStore(store_id=store_id), b"\1\1", bytes(32))

    _, found, _ = reader.control.receive()
    assert (found.chunks, found.coming, found.reason) == (2, 0, "all")
    reader.close()


@pytest.mark.behaviour("D045", "D055")
def test_a_waiting_lookup_is_answered_at_its_deadline(server, pair):
    digest, lookup_id = os.urandom(32), os.urandom(16)
    reader = Pair(server)
    pair.control.ask(m.PrepareStore(request_id="s", store_id=os.urandom(16)), digest)
    reader.control.ask(m.Lookup(request_id="r", lookup_id=lookup_id), digest)

    reply, _ = reader.control.ask(m.LookupStatus(lookup_id=lookup_id, wait_s=0.05))

    assert (reply.chunks, reply.coming) == (0, 1)
    reader.close()


@pytest.mark.slow
@pytest.mark.behaviour("R025", "R079")
def test_many_clients_store_and_load_at_once_and_never_read_a_wrong_byte(server):
    """Few keys, little memory, so that stores collide and chunks are evicted; bytes follow from the digest."""
    shard, rounds, clients = PIECE, 25, 4
    failures = []

    def content(digests):
        return b"".join(digests[i : i + 32] * (shard // 32) for i in range(0, len(digests), 32))

    def work(seed):
        pair = Pair(server, shard)
        rng = np.random.default_rng(seed)
        try:
            for _ in range(rounds):
                first = rng.integers(0, 80)
                digests = b"".join(np.full(4, first * 8 + i, np.uint64).tobytes() for i in range(8))
                pair.store(digests, content(digests), shard)
                read, vouched = pair.load(digests, shard)
                if vouched and read != content(digests)[: len(read)]:
                    failures.append(first)
        except Exception as e:
            failures.append(e)
            raise
        finally:
            pair.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert failures == []
    assert server.counter(series_key("kvpool_errors_total", code="internal")) == 0
    assert server.counter("kvpool_evicted_chunks_total") > 0
    assert server.counter(series_key("kvpool_bulk_bytes_total", direction="out")) > 0
