# SPDX-License-Identifier: Apache-2.0
"""What a pass may take from the one before it: only what stands still, is not old, and of which nothing was seen."""

from typing import Any

import pytest
from tests.unit.operator.cases import facts, with_identity

from kvpool_operator.kept import EVERYTHING, Kept, Part
from kvpool_operator.observed import ClientPod, DaemonSetState, ServerPod
from kvpool_operator.spec import Pool, parse_pool

KEEP_S = 60.0
NOTHING = Part(0)


def pool(**spec: Any) -> Pool:
    return parse_pool(with_identity({"metadata": {"name": "a"}, "spec": {"l1": {"size": "1Gi"}, **spec}}))


def server(node: str, **more: Any) -> ServerPod:
    known: dict[str, Any] = {"revision": "r", "ready": True, "state_for_s": 10.0}
    return ServerPod(name=f"s-{node}", uid=node, node=node, **(known | more))


def state(desired: int = 2, **more: Any) -> DaemonSetState:
    return DaemonSetState(**({"generation": 1, "observed_generation": 1, "desired": desired, "revision": "r"} | more))


def read(kept: Kept, now_s: float, part: Part = EVERYTHING) -> Kept:
    kept.facts, kept.state = facts(), state()
    kept.servers = (server("n1"), server("n2"))
    kept.clients = (ClientPod(namespace="x", name="engine", node="n1"),)
    kept.read(part, now_s)
    return kept


@pytest.fixture
def kept() -> Kept:
    made = Kept(KEEP_S)
    made.begin(pool(), 0.0)
    return read(made, 0.0)


def test_the_first_pass_reads_everything_and_the_next_one_nothing() -> None:
    made = Kept(KEEP_S)

    assert made.begin(pool(), 5.0) == EVERYTHING
    assert read(made, 5.0).begin(pool(), 6.0) == NOTHING


def test_only_the_part_that_changed_is_read_and_only_once(kept: Kept) -> None:
    kept.changed(Part.CLIENTS)

    assert kept.begin(pool(), 1.0) == Part.CLIENTS
    assert read(kept, 1.0, Part.CLIENTS).begin(pool(), 2.0) == NOTHING


def test_what_changes_during_a_pass_is_for_the_next_one(kept: Kept) -> None:
    kept.begin(pool(), 1.0)
    kept.changed(Part.SERVERS)
    kept.read(Part.SERVERS, 1.0)

    assert kept.begin(pool(), 2.0) == Part.SERVERS


def test_what_a_pass_that_failed_has_not_read_is_left_for_the_next_one(kept: Kept) -> None:
    kept.changed(Part.CHILDREN | Part.CLIENTS)
    kept.begin(pool(), 1.0)
    kept.read(Part.CHILDREN, 1.0)

    assert kept.begin(pool(), 2.0) == Part.CLIENTS


def test_each_part_is_read_again_when_it_is_old(kept: Kept) -> None:
    kept.read(Part.CLIENTS, 30.0)

    assert kept.begin(pool(), KEEP_S - 1.0) == NOTHING
    assert kept.begin(pool(), KEEP_S) == Part.CHILDREN | Part.SERVERS


def test_another_spec_is_worth_a_whole_look(kept: Kept) -> None:
    assert kept.begin(pool(chunkTokens=512), 1.0) == EVERYTHING


def test_children_that_were_not_brought_to_what_they_should_be_are_read_again(kept: Kept) -> None:
    kept.facts = None

    assert kept.begin(pool(), 1.0) == Part.CHILDREN


@pytest.mark.parametrize(
    "moving",
    [
        {"ready": False},
        {"deleting": True},
        {"reachable": False},
        {"revision": "former"},
    ],
    ids=lambda m: next(iter(m)),
)
def test_servers_in_motion_are_never_kept(kept: Kept, moving: dict[str, Any]) -> None:
    kept.servers = (server("n1"), server("n2", **moving))

    assert kept.begin(pool(), 1.0) == Part.SERVERS


@pytest.mark.parametrize("found", [None, state(desired=3), state(generation=2)], ids=["none", "one missing", "unseen"])
def test_servers_whose_controller_is_at_work_are_never_kept(kept: Kept, found: DaemonSetState | None) -> None:
    kept.state = found

    assert kept.begin(pool(), 1.0) == Part.SERVERS


@pytest.mark.parametrize("moving", [{"wired": False}, {"deleting": True}], ids=lambda m: next(iter(m)))
def test_clients_that_wait_for_repair_are_never_kept(kept: Kept, moving: dict[str, Any]) -> None:
    kept.clients = (*kept.clients, ClientPod(namespace="x", name="other", node="n2", **moving))

    assert kept.begin(pool(), 1.0) == Part.CLIENTS


def test_kept_servers_grow_older(kept: Kept) -> None:
    assert [p.state_for_s for p in kept.servers_at(0.0)] == [10.0, 10.0]
    assert [p.state_for_s for p in kept.servers_at(7.5)] == [17.5, 17.5]
