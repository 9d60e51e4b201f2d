# SPDX-License-Identifier: Apache-2.0
"""Quotas: whatever the others do, a tenant keeps what it stored within its share, and can always store that much."""

from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.fakes.arena import PAGE, MemoryArena
from tests.fakes.engines import FakeClient, config, digests, namespace
from tests.property.engine_checks import check

from kvpool.config import L1Config
from kvpool.engine.engine import Engine
from kvpool.model.identity import GroupKind, GroupSpec, Mode
from kvpool.model.slots import Disposition

REGIONS, SLOTS = 12, 8
"""Of one page each: 96 chunks in all."""
QUIET = "quiet"
TENANTS = ("loud", "louder", QUIET)


@dataclass(frozen=True)
class Burst:
    """Chunks that one tenant stores, one page or two each; then it looks them up, or forgets them."""

    tenant: str
    pages: int
    chunks: int
    chain: int
    mapped: bool
    ends: bool


bursts = st.builds(
    Burst,
    tenant=st.sampled_from(TENANTS[:2]),
    pages=st.integers(1, 3),
    chunks=st.integers(1, 60),
    chain=st.integers(0, 50),
    mapped=st.booleans(),
    ends=st.booleans(),
)
shares = st.fixed_dictionaries({QUIET: st.floats(0.1, 1.0)}, optional={"loud": st.floats(0.05, 0.9)})


class World:
    """An engine with quotas, and one client for each way in which a tenant stores."""

    def __init__(self, quotas: dict[str, float], evict_above: float = 1.0) -> None:
        self.arena = MemoryArena(REGIONS, SLOTS * PAGE)
        l1 = L1Config(evict_above=evict_above, evict_to=evict_above, verify_loads=0.0, quotas=quotas)
        self.engine = Engine(config(l1=l1), self.arena)
        self.clients: dict[tuple[str, int, bool], FakeClient] = {}
        self.now_s = 0.0

    def client(self, tenant: str, pages: int = 1, *, mapped: bool = False) -> FakeClient:
        key = tenant, pages, mapped
        if key not in self.clients:
            groups = (GroupSpec(kind=GroupKind.FULL, shard_bytes=pages * PAGE),)
            made = FakeClient(
                self.engine,
                self.arena,
                Mode.CLIENT_MOVED if mapped else Mode.STREAMED,
                tenant,
                groups=groups,
                space=namespace(f"{tenant} {pages} {mapped}"),
            )
            self.clients[key] = made.join(self.now_s)
        return self.clients[key]

    def store(self, tenant: str, keys: bytes, pages: int = 1, *, mapped: bool = False) -> list[int]:
        """Store what is not there yet; a mapped client then has its regions mapped."""
        client = self.client(tenant, pages, mapped=mapped)
        if mapped:
            answer = client.store(keys, now_s=self.now_s)
            for region in range(REGIONS):
                self.engine.region_access(client.client_id, region)
            return answer
        store_id, rows = client.prepare(keys, 0, 0, 0, self.now_s)
        for row in (r for r, d in enumerate(rows["disposition"].tolist()) if d == Disposition.WRITE):
            length = int(rows["length"][row])
            self.engine.begin_write(client.client_id, store_id, row, 0, length)[:] = bytes(length)
            self.engine.end_write(client.client_id, store_id, row, length, self.now_s)
        if not (rows["disposition"] == Disposition.WRITE).any():
            return [int(d) for d in rows["disposition"]]
        return client.commit(store_id, rows, now_s=self.now_s)

    def burst(self, burst: Burst) -> None:
        self.store(burst.tenant, digests(*range(burst.chunks), chain=burst.chain), burst.pages, mapped=burst.mapped)
        if burst.ends and burst.mapped:
            client = self.clients.pop((burst.tenant, burst.pages, True))
            self.engine.unregister(client.client_id, self.now_s)

    def tick(self) -> None:
        self.now_s += 1.0
        self.engine.tick(self.now_s)
        check(self.engine)

    def share(self, tenant: str) -> int:
        """Chunks of one page that fit into a tenant's share."""
        return self.engine._core.index.shares.quotas.regions(tenant, REGIONS) * SLOTS


@given(shares, st.lists(bursts, max_size=12), st.booleans(), st.sampled_from([1.0, 0.8]))
def test_what_a_tenant_stored_within_its_share_no_other_can_evict(
    quotas: dict[str, float], noise: list[Burst], mapped: bool, evict_above: float
) -> None:
    assume(sum(quotas.values()) <= 1)
    world = World(quotas, evict_above)
    for burst in noise[: len(noise) // 2]:
        world.burst(burst)
    chunks = int(world.share(QUIET) * evict_above)
    mine = digests(*range(chunks), chain=99)

    answer = world.store(QUIET, mine, mapped=mapped)

    assert answer == [Disposition.STORED] * chunks, "its share is there, whoever was first"
    for burst in noise[len(noise) // 2 :]:
        world.burst(burst)
        world.tick()
        assert world.client(QUIET, mapped=mapped).found(mine, world.now_s) == chunks


@given(shares, st.lists(bursts, min_size=1, max_size=12))
def test_nobody_gets_more_than_its_share(quotas: dict[str, float], noise: list[Burst]) -> None:
    assume(sum(quotas.values()) <= 1)
    world = World(quotas)
    index = world.engine._core.index
    for burst in noise:
        world.burst(burst)
        world.tick()
        assert all(index.regions.held_by(h) <= index.shares.quotas.regions(h, REGIONS) for h in index.shares.holders())


@given(shares, shares, st.lists(bursts, min_size=1, max_size=8))
def test_changed_quotas_hold_as_soon_as_nobody_holds_what_must_go(
    before: dict[str, float], after: dict[str, float], noise: list[Burst]
) -> None:
    assume(sum(before.values()) <= 1)
    assume(sum(after.values()) <= 1)
    world = World(before)
    for burst in noise:
        world.burst(burst)

    world.engine.room.set_quotas(after)
    for client in world.clients.values():
        world.engine.unregister(client.client_id, world.now_s)
    world.clients.clear()
    for _ in range(2 * REGIONS):
        world.tick()

    index = world.engine._core.index
    assert all(index.regions.held_by(h) <= index.shares.quotas.regions(h, REGIONS) for h in index.shares.holders())
    mine = digests(*range(world.share(QUIET)), chain=99)
    assert world.store(QUIET, mine) == [Disposition.STORED] * world.share(QUIET)


def test_what_a_tenant_had_is_everybodys_once_its_quota_is_taken_away() -> None:
    world = World({QUIET: 0.5})
    world.store(QUIET, digests(*range(48), chain=99))

    world.engine.room.set_quotas({})
    for _ in range(REGIONS):
        world.tick()

    assert world.store("loud", digests(*range(96))) == [Disposition.STORED] * 96


def test_without_room_of_its_own_a_store_is_answered_with_quota() -> None:
    world = World({QUIET: 1.0})

    assert world.store("loud", digests(1, 2)) == [Disposition.QUOTA] * 2


@pytest.mark.parametrize("mapped", [True, False])
def test_shares_outlive_a_restart(mapped: bool) -> None:
    world = World({QUIET: 0.5})
    mine = digests(*range(48), chain=99)
    world.store(QUIET, mine, mapped=mapped)
    world.store("loud", digests(*range(48)), mapped=mapped)
    world.arena = world.arena.reopen()
    world.engine = Engine(world.engine._core.config, world.arena)
    world.clients.clear()
    assert world.engine.recover(0.0).chunks == 96

    for chain in range(1, 6):
        world.store("loud", digests(*range(48), chain=chain), mapped=mapped)
        world.tick()

    assert world.client(QUIET, mapped=mapped).found(mine, world.now_s) == 48
