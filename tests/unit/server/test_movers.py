# SPDX-License-Identifier: Apache-2.0
"""The server's movers, as real processes whose device is a file."""

import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.mover_rig import COMMAND, PATIENCE_S
from tests.fakes.ring_device import FakeEngineDevice, make_ring
from tests.fakes.waiting_ring import WaitingRing

from kvpool.model.slots import PLACEMENT, Disposition
from kvpool.server.movers import MoverEvents, Movers
from kvpool.transfer.mover.messages import Direction, Revoked
from kvpool.transfer.plan import slot_ids
from kvpool.transfer.planes import Layout, Plane
from kvpool.transfer.ring_ports import RingJob

SIZE = 256
LAYOUT = Layout(
    planes=(Plane(name="l", storage=0, offset=0, stride=SIZE, block_bytes=SIZE, packing="p"),),
    blocks=8,
    block_tokens=16,
)
ANNE, BERT = b"a" * 16, b"b" * 16


class Server:
    """Plays the loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[int] = []
        self.movers = Movers(self._descriptor, COMMAND)
        self.seen = MoverEvents()
        for number in range(3):
            (folder / f"memory.{number}").write_bytes(b"\xdd" * 8192)

    def start(self, client: bytes) -> FakeEngineDevice:
        ring = make_ring(self.folder / client[:1].decode(), 2, 4 * SIZE)
        self.movers.start(client, ring, os.getpid(), self._listen(client), time.monotonic())
        storage = np.full(8 * SIZE, client[0], dtype=np.uint8)
        return FakeEngineDevice(ring, LAYOUT, [storage], 2)

    def until(self, condition: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < ends_s, self.seen
            events = self.movers.turn(time.monotonic())
            self.seen.ready.extend(events.ready)
            self.seen.revoked.extend(events.revoked)
            self.seen.reaped.extend(events.reaped)
            select.select(self.movers.filenos(), [], [], 0.005)

    def join(self, client: bytes, device: FakeEngineDevice) -> WaitingRing:
        self.until(lambda: any(c == client for c, _, _ in self.seen.ready))
        _, address, secret = next(r for r in reversed(self.seen.ready) if r[0] == client)
        return WaitingRing(device, address, secret, time.monotonic() + PATIENCE_S)

    def _listen(self, client: bytes) -> str:
        path = self.folder / f"{client[:1].decode()}{len(self.seen.ready)}.sock"
        return f"unix:{path}"

    def _descriptor(self, memory: int) -> tuple[int, int]:
        self.asked.append(memory)
        return os.open(self.folder / f"memory.{memory}", os.O_RDWR), 8192


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.movers.end_all("the test is over")
    made.until(lambda: not len(made.movers))


def rows(*memories: int) -> np.ndarray:
    made = np.zeros(len(memories), dtype=PLACEMENT)
    made["memory"], made["length"], made["disposition"] = memories, 2 * SIZE, Disposition.WRITE
    made["offset"] = np.arange(len(memories)) * 2 * SIZE
    return made


def job(grant: bytes, chunks: int) -> RingJob:
    ids = slot_ids(np.arange(2 * chunks).reshape(chunks, 2), 8)
    return RingJob(group=0, grant=grant, ids=ids, chunks=range(chunks))


def stored(ring: WaitingRing, grant: bytes, chunks: int) -> frozenset[int]:
    return ring.store(job(grant, chunks), time.monotonic() + PATIENCE_S)


def test_each_client_moves_what_was_granted_to_it(server: Server) -> None:
    anne, bert = server.start(ANNE), server.start(BERT)
    rings = [server.join(ANNE, anne), server.join(BERT, bert)]
    assert server.movers.grant(ANNE, b"1", Direction.STORE, rows(0, 1))
    assert server.movers.grant(BERT, b"2", Direction.STORE, rows(2))
    server.until(lambda: True)
    server.movers.turn(time.monotonic())

    assert stored(rings[0], b"1", 2) == frozenset()
    assert stored(rings[1], b"2", 1) == frozenset()
    assert stored(rings[1], b"1", 1) == {0}

    assert (server.folder / "memory.0").read_bytes()[: 2 * SIZE] == ANNE[:1] * 2 * SIZE
    assert (server.folder / "memory.1").read_bytes()[2 * SIZE : 4 * SIZE] == ANNE[:1] * 2 * SIZE
    assert (server.folder / "memory.2").read_bytes()[: 2 * SIZE] == BERT[:1] * 2 * SIZE
    for ring in rings:
        ring.close()


def test_memory_is_handed_out_once_until_it_is_taken_back(server: Server) -> None:
    ring = server.join(ANNE, server.start(ANNE))
    server.movers.grant(ANNE, b"1", Direction.STORE, rows(0, 0))
    server.movers.grant(ANNE, b"2", Direction.STORE, rows(0))
    assert server.asked == [0]

    server.movers.forget(0)
    server.movers.grant(ANNE, b"3", Direction.STORE, rows(0))

    assert server.asked == [0, 0]
    server.movers.turn(time.monotonic())
    assert stored(ring, b"3", 1) == frozenset()
    ring.close()


def test_a_row_that_is_left_out_hands_out_nothing(server: Server) -> None:
    server.start(ANNE)
    left_out = rows(0, 1)
    left_out["disposition"][0] = 0

    server.movers.grant(ANNE, b"1", Direction.STORE, left_out)

    assert server.asked == [1]


def test_a_revoked_grant_ends_with_its_bytes(server: Server) -> None:
    ring = server.join(ANNE, server.start(ANNE))
    server.movers.grant(ANNE, b"1", Direction.STORE, rows(0, 0, 0))
    server.movers.turn(time.monotonic())
    stored(ring, b"1", 2)

    assert server.movers.revoke(ANNE, b"1", time.monotonic())
    server.until(lambda: bool(server.seen.revoked))

    assert server.seen.revoked == [(ANNE, Revoked(grant=b"1", moved_bytes=4 * SIZE))]
    ring.close()


def test_ending_a_mover_ends_only_that(server: Server) -> None:
    server.join(ANNE, server.start(ANNE)).close()
    server.join(BERT, server.start(BERT)).close()

    server.movers.end(ANNE, "the client registered again")
    server.until(lambda: bool(server.seen.reaped))

    assert server.seen.reaped == [(ANNE, "the client registered again")]
    assert server.movers.current() == {BERT}


def test_a_mover_that_fails_is_reaped_with_its_reason(server: Server) -> None:
    device = server.start(ANNE)
    ring = server.join(ANNE, device)
    server.movers.grant(ANNE, b"1", Direction.STORE, rows(0))
    server.movers.turn(time.monotonic())
    (server.folder / "a.fail").touch()
    with pytest.raises(Exception, match="store"):
        stored(ring, b"1", 1)

    server.until(lambda: bool(server.seen.reaped))

    assert server.seen.reaped == [(ANNE, "an illegal address")]
    assert not server.movers.grant(ANNE, b"2", Direction.STORE, rows(0))
    assert not server.movers.revoke(ANNE, b"1", time.monotonic())
    assert server.movers.next_deadline_s() is None
    ring.close()
