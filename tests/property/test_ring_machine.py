# SPDX-License-Identifier: Apache-2.0
"""Grants of rings under any order of stores, loads, ends and deaths: no slot is shared, and none stays held.

The server's own handlers run over an engine in memory; movers without processes do what the machine says, and may go on
touching what they were granted until they said otherwise or are reaped.
"""

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.fakes.ring_clients import RingClient, RingWorld

from kvpool.index.phases import Phase
from kvpool.model.errors import CacheError
from kvpool.model.slots import Disposition
from kvpool.transfer.mover.messages import Direction

PLACE = st.integers(0, 1 << 16)
"""Which of several: taken modulo their number."""

CHAIN, FIRST, COUNT = st.integers(0, 7), st.integers(0, 2), st.integers(1, 5)


class RingMachine(RuleBasedStateMachine):
    """See the module."""

    done: ClassVar[Counter[str]] = Counter()

    @initialize()
    def begin(self) -> None:
        self.world = RingWorld()
        self.clients: list[RingClient] = [RingClient(self.world) for _ in range(2)]
        self.stores: list[tuple[RingClient, bytes, bytes, list[int]]] = []
        self.loads: list[tuple[RingClient, bytes, int]] = []
        self.movers_are_ready(joined=True)
        for chain in range(2):
            self.a_store_begins(0, chain, 0, 5)
            self.a_store_ends(0, given_up=False)
            self.a_mover_ends_a_grant(0, None)
            self.world.turn()

    # --- movers ----------------------------------------------------------------------------------------------------

    @rule(place=PLACE, moved=st.sampled_from([None, None, 0, 1]))
    def a_mover_ends_a_grant(self, place: int, moved: int | None) -> None:
        asked = [(m, name) for m in self.world.movers.all() for name, hand in m.grants.items() if hand.asked]
        if asked:
            mover, name = asked[place % len(asked)]
            self.world.movers.say_revoked(mover, name, moved)
            self.done["revoked"] += 1

    @rule(place=PLACE)
    def a_mover_has_moved_all(self, place: int) -> None:
        """It ends such a grant by itself."""
        unasked = [(m, name) for m in self.world.movers.all() for name, hand in m.grants.items() if not hand.asked]
        if unasked:
            self.world.movers.say_revoked(*unasked[place % len(unasked)])
            self.done["ended by themselves"] += 1

    @rule(place=PLACE)
    def a_mover_dies(self, place: int) -> None:
        living = [*self.world.movers.living.values()]
        busy = [mover for mover in living if mover.grants] or living
        if busy:
            mover = busy[place % len(busy)]
            self.done["deaths with grants"] += bool(mover.grants)
            self.world.movers.die(mover)

    @rule(place=PLACE)
    def a_mover_is_reaped(self, place: int) -> None:
        if self.world.movers.ending:
            self.world.movers.reap(self.world.movers.ending[place % len(self.world.movers.ending)])

    # --- clients ---------------------------------------------------------------------------------------------------

    @rule(joined=st.booleans())
    def movers_are_ready(self, joined: bool) -> None:
        """All that were started, and their clients have joined or not."""
        self.world.turn()
        for mover in [m for m in self.world.movers.living.values() if not m.ready]:
            self.world.movers.say_ready(mover)
        self.world.turn()
        for client in self.clients if joined else ():
            client.watch(joined=True)

    @rule(place=PLACE, again=st.booleans())
    def a_client_gives_its_ring_up(self, place: int, again: bool) -> None:
        client = self.clients[place % len(self.clients)]
        client.watch(retired="a missed deadline")
        if again:
            client.register_ring()

    @rule(place=PLACE, how=st.sampled_from(["dead", "lost", "unregistered"]))
    def a_client_leaves_and_another_comes(self, place: int, how: str) -> None:
        client = self.clients.pop(place % len(self.clients))
        if how == "unregistered":
            client.unregister()
        else:
            client.lose(proven_dead=how == "dead")
        self.stores = [store for store in self.stores if store[0] is not client]
        self.loads = [load for load in self.loads if load[0] is not client]
        self.clients.append(RingClient(self.world))

    @rule(place=PLACE, chain=CHAIN, first=FIRST, count=COUNT, calm=st.booleans(), ahead=st.booleans())
    def a_store_begins(
        self, place: int, chain: int, first: int, count: int, calm: bool = False, ahead: bool = False
    ) -> None:
        if calm:
            self.movers_are_ready(joined=True)
        client = self.clients[place % len(self.clients)]
        store_id, grant, rows = client.prepare(*range(first, first + count), chain=chain)
        if (rows["disposition"] == Disposition.WRITE).any():
            self.stores.append((client, store_id, grant, rows["disposition"].tolist()))
            if ahead:
                self.a_store_is_committed_while_its_mover_moves(-1)
        self.done["granted stores"] += bool(grant)

    @precondition(lambda self: self.stores)
    @rule(place=PLACE, given_up=st.booleans(), times=st.integers(1, 2))
    def a_store_ends(self, place: int, given_up: bool, times: int = 1) -> None:
        client, store_id, _, dispositions = self.stores.pop(place % len(self.stores))
        marks = [int(d == Disposition.WRITE and not given_up) for d in dispositions]
        for _ in range(times):
            try:
                self.done["commits that wait"] += client.commit(store_id, marks)[1] is None
            except CacheError:
                self.done["late commits"] += 1

    @precondition(lambda self: self.stores)
    @rule(place=PLACE)
    def a_store_is_committed_while_its_mover_moves(self, place: int) -> None:
        client, store_id, _, dispositions = self.stores[place % len(self.stores)]
        marks = [int(d == Disposition.WRITE) for d in dispositions]
        self.tries("commits ahead", lambda: client.commit(store_id, marks, moving=True))

    @rule(place=PLACE, chain=st.integers(0, 1), count=COUNT, calm=st.booleans(), ahead=st.booleans())
    def a_load_begins(self, place: int, chain: int, count: int, calm: bool, ahead: bool) -> None:
        if calm:
            self.movers_are_ready(joined=True)
        client = self.clients[place % len(self.clients)]
        lookup_id, found = client.lookup(*range(count), chain=chain)
        if found:
            self.done["granted loads"] += bool(client.load(lookup_id, found)[0])
            self.loads.append((client, lookup_id, found))
            if ahead:
                self.a_load_is_committed_while_its_mover_moves(-1)

    @precondition(lambda self: self.loads)
    @rule(place=PLACE)
    def a_load_is_prepared_again(self, place: int) -> None:
        client, lookup_id, found = self.loads[place % len(self.loads)]
        try:
            client.load(lookup_id, found)
        except CacheError:
            self.loads.remove((client, lookup_id, found))

    @precondition(lambda self: self.loads)
    @rule(place=PLACE, freed=st.booleans())
    def a_load_ends(self, place: int, freed: bool) -> None:
        client, lookup_id, found = self.loads.pop(place % len(self.loads))
        if freed:
            client.free(lookup_id)
        else:
            client.loaded(lookup_id, found)

    @precondition(lambda self: self.loads)
    @rule(place=PLACE)
    def a_load_is_committed_while_its_mover_moves(self, place: int) -> None:
        client, lookup_id, found = self.loads[place % len(self.loads)]
        self.tries("loads ahead", lambda: client.loading(lookup_id, found))

    def tries(self, name: str, call: Callable[[], object]) -> None:
        """Count what was done, or refused."""
        try:
            call()
            self.done[name] += 1
        except CacheError:
            self.done[f"refused {name}"] += 1

    # --- time ------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.0, 1.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.turn(seconds)

    @rule(forced=st.booleans())
    def an_admin_clears(self, forced: bool) -> None:
        self.world.engine.clear("t", "", forced, self.world.now_s)

    # --- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def what_a_mover_may_write_is_nobody_elses(self) -> None:
        if not hasattr(self, "world"):
            return
        phase, seen = self.world.slots.phase, set()
        for hand in self.world.hands():
            if hand.direction is Direction.STORE:
                slots = set(hand.slots.tolist())
                assert not slots & seen, "two grants to write one slot"
                seen |= slots
                assert {Phase(p) for p in phase[hand.slots]} <= {Phase.WRITING, Phase.LAPSED}

    @invariant()
    def what_a_mover_may_read_stays(self) -> None:
        if not hasattr(self, "world"):
            return
        for hand in self.world.hands():
            if hand.direction is Direction.LOAD:
                assert (self.world.slots.pins[hand.slots] > 0).all(), "it can be given to a writer"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for client in self.clients:
            client.lose(proven_dead=True)
        for mover in [*world.movers.living.values()]:
            world.movers.die(mover)
        for mover in [*world.movers.ending]:
            world.movers.reap(mover)
        for _ in range(3):
            world.turn(100.0)
        assert len(world.rings) == len(world.movers) == 0
        assert not world.rings.watching
        assert not world.answers.open
        assert not world.slots.pins.any(), "a pin of nobody"
        assert set(world.slots.phase.tolist()) <= {Phase.FREE, Phase.READY}, "a slot that nobody lets go of"
        assert not world.slots.illegal_moves
        world.rings.close(0.0)


@pytest.mark.behaviour("R034", "D014")
def test_no_slot_is_shared_and_none_stays_held() -> None:
    RingMachine.done.clear()
    run_state_machine_as_test(RingMachine, settings=settings(max_examples=150, stateful_step_count=40))

    reached = (
        "granted stores",
        "granted loads",
        "revoked",
        "ended by themselves",
        "commits that wait",
        "deaths with grants",
        "commits ahead",
        "loads ahead",
    )
    assert all(RingMachine.done[name] >= 5 for name in reached), RingMachine.done
