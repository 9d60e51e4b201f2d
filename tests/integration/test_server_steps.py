# SPDX-License-Identifier: Apache-2.0
"""One engine over several real servers, one of which is killed, stopped, restarted or replaced at each step.

Whatever it is and whenever it happens: every job ends, what a load does not call bad is right to the last byte, the
other ranks' parts are not touched, nothing stays pinned anywhere, and the next prompt hits again.
"""

import shutil
from pathlib import Path
from typing import Self

import pytest
from tests.fakes.clients import CHUNK_BLOCKS, digests, until
from tests.fakes.hold_proxy import HoldProxy
from tests.fakes.rank_group import RankGroup
from tests.fakes.server_process import ServerProcess

from kvpool.client.jobs import Answer
from kvpool.model.identity import Mode

KEYS = digests(4)
TARGET = 100
BLOCKS = 4 * CHUNK_BLOCKS
RANKS = 4
START_S = 90
"""A busy machine starts several servers at a time slowly."""
VICTIM = 2
STORING = ("prepare_store", "write_chunk", "commit_store")
LOADING = ("prepare_retrieve", "read_chunk", "commit_retrieve")
JOINING = ("hello", "attach_bulk", "register")
ENDING = ("free_lookup", "end_request")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    made = [ServerProcess(tmp_path_factory.mktemp(f"server{n}")) for n in range(8)]
    yield made
    for process in made:
        process.kill()


@pytest.fixture
def servers(processes):
    """Running servers, whatever the last test did to them."""
    for process in processes[:RANKS]:
        process.start()
    return processes


class Fault:
    """Something that happens to a server, and its end."""

    def __init__(self, kind: str, server: ServerProcess) -> None:
        self.kind, self.server = kind, server

    def begin(self) -> None:
        match self.kind:
            case "killed":
                self.server.kill()
            case "stopped":
                self.server.stop()
            case "restarted":
                self.server.restart()
            case "replaced":
                self.server.kill()
                shutil.rmtree(self.server.folder / "l1")
                self.server.start()

    def end(self) -> None:
        if self.kind == "stopped":
            self.server.go_on()
        self.server.start()


class Rig:
    """Four ranks, the victim's connections through a proxy that stops a message at will."""

    def __init__(self, servers: list[ServerProcess], folder: Path, name: str) -> None:
        self.victim = servers[VICTIM]
        self.proxy = HoldProxy(folder / "p.sock", Path(self.victim.path))
        addresses = [server.address for server in servers[:RANKS]]
        addresses[VICTIM] = self.proxy.address
        self.group = RankGroup(addresses, name, modes=(Mode.STREAMED,), transfer_s=2.0)

    def __enter__(self) -> Self:
        self.proxy.__enter__()
        self.group.__enter__()
        self.group.healthy(START_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self.group.__exit__(*exc)
        self.proxy.__exit__(*exc)

    def store(self) -> None:
        for rank in self.group.ranks:
            rank.store(KEYS)

    def check_loads(self, request_id: str) -> list[frozenset[int]]:
        """Wait for all loads; every byte that is not called bad must be right."""
        bad = [rank.end_load(request_id) for rank in self.group.ranks]
        for rank, blocks in zip(self.group.ranks, bad, strict=True):
            good = [b for b in range(BLOCKS) if TARGET + b not in blocks]
            assert (rank.blocks.memory[[TARGET + b for b in good]] == rank.blocks.memory[good]).all()
        return bad

    def check_recovery(self) -> None:
        """After the fault everything works as before."""
        self.group.healthy(START_S)
        self.group.no_leases()
        self.store()
        answer = self.group.lookup(KEYS, "after")
        assert answer.chunks == 4
        for rank in self.group.ranks:
            rank.begin_load(answer, TARGET, "after")
        assert self.check_loads("after") == [frozenset()] * RANKS
        self.group.scheduler.end("after")
        self.group.no_leases()


@pytest.fixture
def rig(servers, tmp_path, request):
    with Rig(servers, tmp_path, request.node.name) as rig:
        yield rig


FAULTS = ("killed", "stopped", "restarted", "replaced")


@pytest.mark.slow
@pytest.mark.behaviour("D070", "D074", "D076", "R127")
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("step", STORING)
def test_a_store(rig, kind, step):
    fault, hold = Fault(kind, rig.victim), rig.proxy.hold(step)
    for rank in rig.group.ranks:
        rank.begin_store(KEYS)
    hold.wait_held(10)

    fault.begin()
    hold.release()
    for rank in rig.group.ranks:
        rank.end_store()
    fault.end()

    rig.check_recovery()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_lookup(rig, kind):
    rig.store()
    fault, hold = Fault(kind, rig.victim), rig.proxy.hold("lookup")
    rig.group.scheduler.lookup("l", KEYS, rig.group.shards)
    hold.wait_held(10)

    fault.begin()
    hold.release()
    answer = until(lambda: rig.group.scheduler.answer("l"))
    rig.group.scheduler.end("l")
    fault.end()

    assert answer == Answer(0), "its server did not answer in time, or was another one"
    rig.check_recovery()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("step", LOADING)
def test_a_load(rig, kind, step):
    rig.store()
    answer = rig.group.lookup(KEYS)
    assert answer.chunks == 4
    fault, hold = Fault(kind, rig.victim), rig.proxy.hold(step)
    for rank in rig.group.ranks:
        rank.begin_load(answer, TARGET)
    hold.wait_held(10)

    fault.begin()
    hold.release()
    bad = rig.check_loads("l")
    fault.end()

    assert [not blocks for number, blocks in enumerate(bad) if number != VICTIM] == [True] * (RANKS - 1)
    assert bad[VICTIM] == frozenset(range(TARGET, TARGET + BLOCKS)), "without the server's word nothing is good"
    rig.group.scheduler.forget_failed("l")
    rig.group.scheduler.end("l")
    rig.check_recovery()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("step", JOINING)
def test_a_handshake(rig, kind, step):
    """Meanwhile lookups end in their time, whether this rank or the scheduler has no session."""
    rig.store()
    fault, hold = Fault(kind, rig.victim), rig.proxy.hold(step)
    rig.victim.restart()
    hold.wait_held(30)

    fault.begin()
    rig.group.lookup(KEYS, "meanwhile")
    rig.group.scheduler.end("meanwhile")
    hold.release()
    fault.end()

    rig.check_recovery()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_lookup_whose_last_chunks_are_still_coming(rig, kind):
    for number, rank in enumerate(rig.group.ranks):
        if number != VICTIM:
            rank.store(KEYS)
    writing = rig.proxy.hold("write_chunk")
    rig.group.ranks[VICTIM].begin_store(KEYS)
    writing.wait_held(10)
    fault, hold = Fault(kind, rig.victim), rig.proxy.hold("lookup_status")
    rig.group.scheduler.lookup("l", KEYS, rig.group.shards)
    until(lambda: rig.group.scheduler.answer("l") or hold.held.is_set())

    fault.begin()
    hold.release()
    answer = until(lambda: rig.group.scheduler.answer("l"))
    writing.release()
    rig.group.ranks[VICTIM].end_store()
    rig.group.scheduler.end("l")
    fault.end()

    assert answer == Answer(0), "nothing of it was there"
    rig.check_recovery()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("step", ENDING)
def test_an_end(rig, kind, step):
    """What could not be said any more is not lost: nothing stays pinned."""
    rig.store()
    assert rig.group.lookup(KEYS).chunks == 4
    fault, hold = Fault(kind, rig.victim), rig.proxy.hold(step)
    if step == "free_lookup":
        rig.group.scheduler.release("l")
    else:
        rig.group.scheduler.end("l")
    hold.wait_held(10)

    fault.begin()
    hold.release()
    fault.end()

    rig.check_recovery()


@pytest.mark.slow
@pytest.mark.behaviour("R114", "R115")
@pytest.mark.parametrize("count", [5, 6, 7, 8])
def test_many_servers_of_which_each_holds_another_length(servers, request, count):
    for process in servers[:count]:
        process.start()
    with RankGroup([server.address for server in servers[:count]], request.node.name) as group:
        group.healthy(START_S)
        for number, rank in enumerate(group.ranks):
            rank.store(KEYS[: (4 if number % 2 else 3) * 32])

        answer = group.lookup(KEYS)

        assert answer.chunks == 3
        for rank in group.ranks:
            rank.begin_load(answer, TARGET)
        assert [rank.end_load() for rank in group.ranks] == [frozenset()] * count
        group.scheduler.end("l")
        group.no_leases()
