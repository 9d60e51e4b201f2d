# SPDX-License-Identifier: Apache-2.0
"""Which servers a Paced update replaces next, case by case and against a model of a whole cluster."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operator.cases import with_identity
from tests.unit.operator.world import STARTUP_S, World, paced, seen, server

from kvpool_operator.observed import ClientPod, ServerStats
from kvpool_operator.rollout import State, decide
from kvpool_operator.spec import Pool, parse_pool


def client(node: str, group: str = "", name: str = "") -> ClientPod:
    return ClientPod(namespace="models", name=name or f"vllm-{node}", node=node, group=group)


def replaced(pool: Pool, *servers: object, **more: object) -> list[str]:
    decision = decide(pool, seen(*servers, **more), STARTUP_S)  # type: ignore[arg-type]
    return [p.node for p in decision.replace]


def run(world: World, pool: Pool, steps: int = 400) -> list[State]:
    """Let operator and cluster take turns until nothing changes any more; returns the states on the way."""
    states = []
    for _ in range(steps):
        decision = decide(pool, world.observed(), STARTUP_S)
        states.append(decision.state)
        world.delete(decision.replace)
        world.step(5.0)
        if decision.state in (State.UP_TO_DATE, State.STOPPED, State.NODES_AWAY):
            break
    return states


def test_nothing_to_do_when_all_are_new() -> None:
    assert decide(paced(), seen(server("a", "new")), STARTUP_S).state is State.UP_TO_DATE


def test_waits_until_the_controller_has_seen_the_spec() -> None:
    late = seen(server("a"))
    late = type(late)(
        daemon_set=type(late.daemon_set)(generation=3, observed_generation=2, desired=1, revision="new"),
        servers=late.servers,
    )

    assert decide(paced(), late, STARTUP_S).state is State.WAITING


@pytest.mark.parametrize("strategy", ["RollingUpdate", "OnDelete"])
def test_other_strategies_are_left_to_kubernetes(strategy: str) -> None:
    decision = decide(paced(strategy=strategy), seen(server("a")), STARTUP_S)

    assert (decision.state, decision.replace) == (State.BY_KUBERNETES, ())


def test_a_pause_stops_everything() -> None:
    decision = decide(paced(paused=True), seen(server("a"), server("b")), STARTUP_S)

    assert (decision.state, decision.replace) == (State.PAUSED, ())


def test_the_canary_comes_first_and_alone() -> None:
    assert replaced(paced(maxUnavailable=5), server("a"), server("b"), server("c")) == ["a"]


def test_the_canary_is_a_node_with_few_engines() -> None:
    clients = (client("a"), client("b", name="x"), client("b", name="y"))

    assert replaced(paced(), server("a"), server("b"), server("c"), clients=clients) == ["c"]
    assert replaced(paced(), server("a"), server("b"), clients=clients) == ["a"]


def test_a_server_that_does_not_work_anyway_is_the_canary() -> None:
    sick = server("b", ready=False, waiting="CrashLoopBackOff")

    assert replaced(paced(), server("a"), sick, server("c"), clients=(client("b"),)) == ["b"]


@pytest.mark.parametrize(
    "canary",
    [
        {"ready": True, "state_for_s": 29.0},
        {"ready": False, "state_for_s": 20.0},
        {"ready": False, "state_for_s": 20.0, "waiting": "ContainerCreating"},
        {"ready": False, "state_for_s": 9999.0, "waiting": "Unschedulable"},
    ],
)
def test_nothing_further_before_the_canary_has_settled(canary: dict[str, object]) -> None:
    new = server("a", "new", **canary)

    decision = decide(paced(maxUnavailable=5), seen(new, server("b"), server("c")), STARTUP_S)

    assert (decision.state, decision.replace) == (State.SETTLING, ())


@pytest.mark.parametrize(
    "canary", [{"waiting": "ImagePullBackOff"}, {"waiting": "CrashLoopBackOff"}, {"state_for_s": 2 * STARTUP_S + 1}]
)
def test_a_new_server_that_fails_stops_the_update(canary: dict[str, object]) -> None:
    new = server("a", "new", **({"ready": False, "state_for_s": 1.0} | canary))

    decision = decide(paced(maxUnavailable=5), seen(new, server("b")), STARTUP_S)

    assert (decision.state, decision.replace) == (State.STOPPED, ())
    assert "a" in decision.message


def test_after_the_canary_the_budget_counts() -> None:
    new = server("a", "new")

    assert replaced(paced(maxUnavailable=2), new, server("b"), server("c"), server("d")) == ["b", "c"]
    assert replaced(paced(maxUnavailable="50%"), new, server("b"), server("c"), server("d")) == ["b", "c"]
    assert replaced(paced(maxUnavailable=2), new, server("b", deleting=True), server("c"), server("d")) == ["c"]
    assert replaced(paced(maxUnavailable=2), new, server("c"), server("d"), server("e"), desired=5) == ["c"]


def test_a_new_server_that_stores_and_never_hits_holds_the_update() -> None:
    def stats(node: str, hits: int) -> ServerStats:
        return ServerStats(
            node=node, boot_id=node, version="1", stored_chunks=9, hit_tokens=hits, lookups={"missing": 30}
        )

    servers = (server("a", "new"), server("b"), server("c"))

    held = decide(paced(), seen(*servers, stats=(stats("a", 0), stats("b", 5))), STARTUP_S)
    assert (held.state, held.replace) == (State.SETTLING, ())
    assert replaced(paced(), *servers, stats=(stats("a", 1), stats("b", 5))) == ["b"]
    assert replaced(paced(), *servers, stats=(stats("a", 0), stats("b", 0))) == ["b"], "nobody hits: no judgement"


@pytest.mark.parametrize(
    ("lookups", "hits", "old_hits", "by_time"),
    [(0, 0, 5, True), (19, 0, 5, True), (30, 0, 0, True), (1, 7, 5, False), (30, 7, 0, False)],
)
def test_without_traffic_time_and_health_decide_and_the_status_says_so(
    lookups: int, hits: int, old_hits: int, *, by_time: bool
) -> None:
    def stats(node: str, asked: int, hit: int) -> ServerStats:
        return ServerStats(node=node, boot_id=node, version="1", lookups={"all": asked}, hit_tokens=hit)

    known = (stats("a", lookups, hits), stats("b", 100, old_hits))
    servers = (server("a", "new"), server("b"), server("c"))

    for observed in (seen(*servers, stats=known), seen(*servers, server("d", "new", state_for_s=0.0), stats=known)):
        decision = decide(paced(), observed, STARTUP_S)
        assert ("time and health decide" in decision.message) == by_time, decision
    assert "time and health decide" in decide(paced(), seen(*servers), STARTUP_S).message


def test_the_nodes_of_one_engine_go_together() -> None:
    servers = [server("a", "new"), *(server(n) for n in "bcdefg")]
    clients = (client("c", "engine-0"), client("e", "engine-0", "other"), client("b"), client("d"))

    assert replaced(paced(maxUnavailable=2), *servers, clients=clients) == ["f", "g"]
    busy = (*clients, *(client(n, name=f"x{n}{i}") for n in "bdfg" for i in range(3)))
    assert replaced(paced(maxUnavailable=1), *servers, clients=busy) == ["c", "e"], "larger than the budget: alone"


def test_an_engine_over_most_of_the_pool_goes_node_by_node() -> None:
    servers = [server("a", "new"), *(server(n) for n in "bcd")]
    clients = tuple(client(n, "engine-0") for n in "bcd")

    assert replaced(paced(), *servers, clients=clients) == ["b"]


def test_nodes_out_of_sight_are_skipped_and_named() -> None:
    gone = server("a", reachable=False)

    assert replaced(paced(), gone, server("b")) == ["b"]
    decision = decide(paced(), seen(gone, server("b", "new")), STARTUP_S)
    assert (decision.state, decision.replace) == (State.NODES_AWAY, ())


nodes = st.integers(1, 12).map(lambda n: [f"n{i:02}" for i in range(n)])


@settings(max_examples=60)
@given(nodes, st.integers(1, 4), st.integers(0, 3), st.data())
def test_a_good_change_reaches_every_server_in_sight_within_the_budget(
    names: list[str], budget: int, canary: int, data: st.DataObject
) -> None:
    away = data.draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
    world = World(names, away=away)
    pool = paced(maxUnavailable=budget, canary=canary)
    world.revision = "r1"
    states = []
    for _ in range(600):
        decision = decide(pool, world.observed(), STARTUP_S)
        states.append(decision.state)
        world.delete(decision.replace)
        assert len(world.unready()) <= max(budget, canary)
        world.step(5.0)
        if decision.state in (State.UP_TO_DATE, State.NODES_AWAY):
            break

    assert {n for n, p in world.pods.items() if p.revision == "r1"} == set(names) - away
    assert State.STOPPED not in states


@settings(max_examples=40)
@given(nodes, st.integers(1, 4), st.integers(1, 3))
def test_two_bad_changes_in_a_row_hit_the_same_few_servers(names: list[str], budget: int, canary: int) -> None:
    world = World(names, bad={"r1", "r2"})
    pool = paced(maxUnavailable=budget, canary=canary)
    for revision in ("r1", "r2"):
        world.revision = revision
        assert run(world, pool)[-1] in (State.STOPPED, State.UP_TO_DATE)

    assert len(world.unready()) <= min(canary, len(names))
    world.revision = "r0"  # the revert
    assert run(world, pool)[-1] is State.UP_TO_DATE
    for _ in range(20):
        world.step(5.0)
    assert not world.unready()
    assert world.revisions() == {"r0"}


@settings(max_examples=40)
@given(st.integers(2, 5), st.integers(1, 3))
def test_engines_over_several_nodes_are_cold_once(engines: int, size: int) -> None:
    names = [f"e{e}-{i}" for e in range(engines) for i in range(size)]
    clients = tuple(client(n, n.split("-")[0]) for n in names)
    world = World(names, clients=clients)
    world.revision = "r1"
    pool = paced(maxUnavailable=1, canary=0)
    batches = []
    for _ in range(600):
        decision = decide(pool, world.observed(), STARTUP_S)
        if decision.replace:
            batches.append({p.node.split("-")[0] for p in decision.replace})
        world.delete(decision.replace)
        world.step(5.0)

    assert world.revisions() == {"r1"}
    assert len(batches) == engines
    assert all(len(b) == 1 for b in batches)


def test_percentages_round_up() -> None:
    servers = [server("a", "new"), *(server(f"n{i}") for i in range(29))]

    assert len(replaced(paced(maxUnavailable="10%"), *servers)) == math.ceil(3.0)
    assert len(replaced(paced(maxUnavailable="1%"), *servers)) == 1


def test_the_pool_of_the_helper_is_paced() -> None:
    plain = parse_pool(with_identity({"metadata": {"name": "a"}, "spec": {"l1": {"size": "1Gi"}}}))

    assert plain.spec.update.strategy == "RollingUpdate"
    assert paced().spec.update.strategy == "Paced"
