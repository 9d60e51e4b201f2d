# SPDX-License-Identifier: Apache-2.0
"""What the status says in each situation, and that it says the same twice."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operator.cases import with_identity
from tests.unit.operator.world import seen, server

from kvpool_operator.observed import ClientPod, DaemonSetState, Observed, ServerPod, ServerStats, Window, traffic
from kvpool_operator.spec import Condition, Pool, PoolStatus, dump, parse_pool, parse_status
from kvpool_operator.status import Progress, status

DONE = Progress("UpToDate")
GIB = 1 << 30


def pool(**spec: Any) -> Pool:
    return parse_pool(with_identity({"metadata": {"name": "a"}, "spec": {"l1": {"size": "1Gi"}, **spec}}))


def stats(node: str = "n1", **more: Any) -> ServerStats:
    known = {"boot_id": node, "version": "0.1.0", "capacity_bytes": GIB, "clients": 1, "used_bytes": 1}
    return ServerStats(node=node, **(known | more))


def judged(observed: Observed, progress: Progress = DONE, of: Pool | None = None) -> PoolStatus:
    return status(of or pool(), observed, progress, PoolStatus(), "2030-01-01T00:00:00Z")


def condition(result: PoolStatus, kind: str) -> Condition:
    (found,) = [c for c in result.conditions if c.type == kind]
    return found


def verdict(window: Window, *servers: ServerStats) -> tuple[str, str]:
    found = condition(judged(seen(server("n1", "new"), stats=servers or (stats(),), window=window)), "Hitting")
    return found.status, found.reason


def test_all_servers_ready_and_new_is_ready() -> None:
    result = judged(seen(server("n1", "new"), server("n2", "new")))

    assert condition(result, "Ready").status == "True"
    assert result.servers is not None
    assert (result.servers.summary, result.servers.updated) == ("2/2", 2)


@pytest.mark.parametrize(
    ("observed", "reason"),
    [
        (Observed(), "NoServers"),
        (seen(desired=0), "NoNodes"),
        (seen(server("n1", "new", ready=False)), "NoServers"),
        (seen(desired=2, pods_refused="forbidden: violates PodSecurity"), "PodsRefused"),
        (seen(server("n1", "new"), server("n2", "new", ready=False)), "Starting"),
        (seen(server("n1", "new"), server("n2", "old")), "NotUpdated"),
        (seen(server("n1", "new"), error="spec.env: duplicate"), "Refused"),
        (
            Observed(
                daemon_set=DaemonSetState(generation=2, observed_generation=1, desired=1, revision="new"),
                servers=(server("n1", "new"),),
            ),
            "Applying",
        ),
    ],
)
def test_ready_is_false_for_the_reason(observed: Observed, reason: str) -> None:
    found = condition(judged(observed), "Ready")

    assert (found.status, found.reason) == ("False", reason)


def test_every_condition_is_explained() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    section = guide.partition("\n## The pool's status\n")[2].partition("\n## ")[0]

    explained = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)

    assert sorted(explained) == sorted(c.type for c in judged(seen(server("n1", "new"))).conditions)


def test_old_servers_that_serve_are_not_success() -> None:
    working = Progress("Progressing", "1 servers to update", done=False)

    result = judged(seen(server("n1", "old"), server("n2", "new")), working)

    assert condition(result, "Available").status == "True"
    assert condition(result, "Ready").status == "False"
    assert condition(result, "Progressing").reason == "Progressing"


def test_nodes_out_of_sight_do_not_hold_ready_back_but_are_named() -> None:
    result = judged(seen(server("n1", "new"), server("n2", "old", reachable=False)))

    assert condition(result, "Ready").status == "True"
    assert condition(result, "Degraded").status == "True"
    assert [(p.node, p.reason) for p in result.problem_nodes] == [("n2", "Unreachable")]


def test_a_stopped_rollout_is_degraded_in_words() -> None:
    result = judged(seen(server("n1", "new")), Progress("Stopped", "new server unwell on n1", done=False, stopped=True))

    assert condition(result, "Degraded").reason == "RolloutStopped"
    assert "n1" in condition(result, "Degraded").message


def test_a_node_without_room_says_how_much_is_needed() -> None:
    full = server("n1", "new", ready=False, waiting="Unschedulable", message="Insufficient memory")

    (problem,) = judged(seen(full, request_bytes=72 * GIB)).problem_nodes

    assert problem.reason == "Unschedulable"
    assert "72Gi" in problem.message
    assert "Insufficient memory" in problem.message


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"state_for_s": 59.0}, False),
        ({"state_for_s": 59.0, "waiting": "ContainerCreating"}, False),
        ({"state_for_s": 59.0, "deleting": True}, False),
        ({"state_for_s": 61.0}, True),
        ({"state_for_s": 59.0, "restarts": 1}, True),
        ({"state_for_s": 59.0, "waiting": "ImagePullBackOff"}, True),
        ({"state_for_s": 59.0, "waiting": "Unschedulable"}, True),
        ({"state_for_s": 59.0, "reachable": False}, True),
    ],
)
def test_a_server_that_takes_its_time_is_no_problem(more: dict[str, Any], problem: bool) -> None:
    result = judged(seen(server("n1", "new"), server("n2", "new", ready=False, **more), startup_s=60.0))

    assert result.problem_node_count == problem
    assert condition(result, "Degraded").status == str(problem)


def test_at_most_ten_problem_nodes_and_the_count_of_all() -> None:
    result = judged(seen(*(server(f"n{i:03}", "new", ready=False) for i in range(500))))

    assert len(result.problem_nodes) == 10
    assert result.problem_node_count == 500
    assert [p.node for p in result.problem_nodes] == sorted(p.node for p in result.problem_nodes)
    assert len(str(dump(result))) < 6000


@pytest.mark.parametrize(
    ("window", "outcome"),
    [
        (Window(), ("Unknown", "NoTraffic")),
        (Window(lookups={"all": 3}, prompt_tokens=100, hit_tokens=50), ("True", "Hitting")),
        (Window(lookups={"missing": 3}, prompt_tokens=9, stored_chunks=5), ("False", "NoReuse")),
        (Window(lookups={"missing": 3}, stored_chunks=5, evicted_chunks=4), ("False", "EvictedBeforeReuse")),
        (Window(lookups={"other_layout": 3, "missing": 1}), ("False", "OtherLayout")),
        (Window(lookups={"incomplete": 3}), ("False", "ShardsMissing")),
        (Window(lookups={"pin_limit": 3}), ("False", "PinLimit")),
        (Window(lookups={"short": 3}), ("False", "PromptsTooShort")),
        (Window(lookups={"ended": 3}), ("False", "RequestsEndFirst")),
    ],
)
def test_the_verdict_why_nothing_hits(window: Window, outcome: tuple[str, str]) -> None:
    assert verdict(window) == outcome


def test_the_verdict_knows_empty_pools_from_silent_ones() -> None:
    empty = stats(used_bytes=0)

    assert verdict(Window(lookups={"missing": 3}), empty) == ("False", "NothingStored")
    assert verdict(Window(), stats(clients=0)) == ("Unknown", "NoClients")
    assert condition(judged(seen(server("n1", "new"))), "Hitting").reason == "NoReports"


@pytest.mark.parametrize(
    ("mode", "more", "outcome"),
    [
        ("None", {}, ("True", "NotNeeded")),
        ("Auto", {"runtime_class_missing": "nvidia"}, ("False", "RuntimeClassMissing")),
        ("Auto", {"stats": (stats(gpus=8), stats("n2", gpus=0))}, ("False", "NoGPUVisible")),
        ("Auto", {"stats": (stats(gpus=8),)}, ("True", "GPUsVisible")),
        ("NRI", {"stats": (stats(gpus=8),), "node_gpus": {"n1": 8, "n2": 8}}, ("True", "GPUsVisible")),
        ("NRI", {"stats": (stats(gpus=7),), "node_gpus": {"n1": 8}}, ("False", "FewerGPUsThanNode")),
        ("DRA", {"stats": (stats(gpus=8, gpu_reason="MIGUnsupported"),)}, ("False", "MIGUnsupported")),
        ("Privileged", {"stats": (stats(gpus=8, gpu_reason="DriverSilent"),)}, ("False", "DriverSilent")),
        ("Auto", {"stats": (stats(gpu_reason="NotLooked"),)}, ("Unknown", "NotReported")),
        ("Auto", {"stats": (stats(),)}, ("Unknown", "NotReported")),
    ],
)
def test_gpu_access(mode: str, more: dict[str, Any], outcome: tuple[str, str]) -> None:
    result = judged(seen(server("n1", "new"), **more), of=pool(gpuAccess={"mode": mode}))
    found = condition(result, "GPUAccessReady")

    assert (found.status, found.reason) == outcome


@pytest.mark.parametrize(
    ("mode", "hint"),
    [
        ("RuntimeClass", "NVIDIA_VISIBLE_DEVICES"),
        ("NRI", "NRI_MANAGEMENT"),
        ("DRA", "admin-access"),
        ("Privileged", "loaded"),
    ],
)
def test_a_server_without_gpus_is_a_problem_node_and_the_mode_says_where_to_look(mode: str, hint: str) -> None:
    blind = seen(server("n1", "new", ready=False), stats=(stats(gpus=0, gpu_reason="NoGPUVisible"),), gpu_mode=mode)

    result = judged(blind, of=pool(gpuAccess={"mode": mode}))

    assert hint in condition(result, "GPUAccessReady").message
    assert [(p.node, p.reason) for p in result.problem_nodes] == [("n1", "NoGPUVisible")]


def test_unwired_pods_are_counted_and_one_is_named() -> None:
    clients = tuple(ClientPod(namespace="m", name=f"p{i}", node="n1", wired=i > 1) for i in range(4))

    found = condition(judged(seen(server("n1", "new"), clients=clients)), "ClientsWired")

    assert (found.status, found.reason) == ("False", "UnwiredPods")
    assert found.message.startswith("2 pods")
    assert "m/p0" in found.message


def resized(*servers: ServerStats) -> Condition:
    return condition(judged(seen(server("n1", "new"), stats=servers)), "L1Resized")


def test_the_size_of_l1_is_as_asked_on_the_way_or_refused() -> None:
    there = stats("a", asked_bytes=GIB, wanted_bytes=GIB)

    assert (resized(stats()).status, resized(stats()).reason) == ("Unknown", "NotReported")
    assert (resized(there).status, resized(there).reason) == ("True", "AsAsked")
    held = resized(there, stats("b", asked_bytes=GIB, wanted_bytes=GIB, mapped_bytes=GIB))
    assert (held.status, "1Gi stay taken" in held.message) == ("True", True)
    shrinking = stats("b", asked_bytes=GIB, wanted_bytes=GIB, capacity_bytes=2 * GIB)
    file_to_come = stats("c", asked_bytes=2 * GIB, wanted_bytes=2 * GIB, capacity_bytes=2 * GIB)
    for pending in (shrinking, file_to_come):
        found = resized(there, pending)
        assert (found.status, found.reason) == ("False", "Resizing")
        assert f"1 of 2 servers are on the way, first {pending.node}" in found.message
    found = resized(there, shrinking, stats("d", asked_bytes=GIB, refused="no room: 1 of 2"))
    assert (found.status, found.reason) == ("False", "Refused")
    assert "first d: no room" in found.message


def test_settings_are_followed_when_every_server_of_this_version_says_so() -> None:
    def followed(*servers: ServerStats) -> Condition:
        return condition(judged(seen(server("a", "new"), stats=servers, live_digest="new")), "SettingsFollowed")

    there, behind = stats("a", live_digest="new"), stats("b", live_digest="old")

    for silent in (stats("a"), stats("a", live_digest="old", version="0.0.9")):
        assert (followed(silent).status, followed(silent).reason) == ("Unknown", "NotReported")
    assert (followed(there).status, followed(there).reason) == ("True", "ByAllServers")
    assert (followed(there, behind).status, followed(there, behind).reason) == ("False", "Spreading")
    assert "1 of 2 servers have former settings or have not told, first b" in followed(there, behind).message
    refusing = followed(there, behind, stats("c", live_digest="old", refused="l1.quotas: 1.2"))
    assert (refusing.status, refusing.reason) == ("False", "Refused")
    assert "first c: l1.quotas" in refusing.message
    too_large = stats("c", live_digest="new", refused="l1.size_bytes: more than this server can have")
    assert followed(there, too_large).status == "True", "L1Resized says that"


@pytest.mark.parametrize("other", [(), (stats("n2", live_digest="new", version="0.0.9"),)], ids=["silent", "older"])
def test_who_does_not_say_what_it_follows_is_waited_for_after_a_change_and_then_believed(
    other: tuple[ServerStats, ...],
) -> None:
    """No answer for once is no news; but a namespace that was taken off may still be let in there."""

    def after(former: PoolStatus, *servers: ServerStats) -> tuple[PoolStatus, Condition]:
        observed = seen(server("n1", "new"), server("n2", "new"), stats=servers, live_digest="new")
        result = status(pool(), observed, DONE, former, "2030-01-01T00:00:00Z")
        return result, condition(result, "SettingsFollowed")

    there = stats("n1", live_digest="new")
    young, said = after(PoolStatus(), there, *other)
    assert (said.status, said.reason) == ("Unknown", "NotReported"), "a pool that has just been made is no trouble"
    assert after(young, there, *other)[1].status == "Unknown"
    changed, said = after(young, there, stats("n2", live_digest="old"))
    assert (said.status, said.reason) == ("False", "Spreading")
    waiting, said = after(changed, there, *other)
    assert (said.status, said.reason) == ("False", "Spreading")
    assert "1 of 2 servers" in said.message
    assert "n2" in said.message
    followed, said = after(waiting, there, stats("n2", live_digest="new"))
    assert said.status == "True"
    assert after(followed, there, *other)[1].status == "True"


def test_clients_in_namespaces_that_are_not_watched_are_unknown_but_a_known_unwired_one_comes_first() -> None:
    def wired(*clients: ClientPod) -> Condition:
        observed = seen(server("n1", "new"), clients=clients, unwatched=("ml-b", "ml-c"))
        return condition(judged(observed), "ClientsWired")

    assert (wired().status, wired().reason) == ("Unknown", "NamespacesNotWatched")
    assert "2 namespaces" in wired().message
    assert "ml-b" in wired().message
    assert wired(ClientPod(namespace="m", name="p", node="n1")).reason == "NamespacesNotWatched"
    assert wired(ClientPod(namespace="m", name="p", node="n1", wired=False)).reason == "UnwiredPods"


def test_rates_are_sums_over_servers_not_means() -> None:
    before = (stats("a", prompt_tokens=100, hit_tokens=100), stats("b"))
    after = (stats("a", prompt_tokens=200, hit_tokens=100), stats("b", prompt_tokens=900, hit_tokens=900))

    window = traffic(before, after, 60)
    result = judged(seen(server("a", "new"), stats=after, window=window))

    assert result.hit_rate == "0.90"
    assert (result.capacity, result.clients) == ("2Gi", 2)


def test_a_restarted_server_counts_from_zero() -> None:
    before = (stats("a", prompt_tokens=1000, lookups={"all": 9}),)
    after = (stats("a", boot_id="again", prompt_tokens=5, lookups={"all": 1}),)

    window = traffic(before, after, 60)

    assert (window.prompt_tokens, window.lookups) == (5, {"all": 1})


def test_versions_are_counted_and_capped() -> None:
    many = tuple(stats(f"n{i}", version=f"1.{i}") for i in range(20))

    assert len(judged(seen(server("n1", "new"), stats=many)).versions) == 8


pods = st.lists(
    st.builds(
        ServerPod,
        name=st.just("x"),
        uid=st.just("x"),
        node=st.sampled_from([f"n{i}" for i in range(20)]),
        revision=st.sampled_from(["old", "new"]),
        ready=st.booleans(),
        reachable=st.booleans(),
        deleting=st.booleans(),
        waiting=st.sampled_from(["", "CrashLoopBackOff", "Unschedulable"]),
    ),
    max_size=20,
)
windows = st.builds(
    Window,
    lookups=st.dictionaries(st.sampled_from(["all", "missing", "short", "new_reason"]), st.integers(0, 9)),
    prompt_tokens=st.integers(0, 100),
    hit_tokens=st.integers(0, 100),
)


@given(pods, windows, st.lists(st.sampled_from(["1", "2"]), max_size=4), st.randoms())
def test_a_status_is_stable(servers: list[ServerPod], window: Window, versions: list[str], shuffle: Any) -> None:
    numbers = tuple(stats(f"n{i}", version=v) for i, v in enumerate(versions))
    one = seen(*servers, window=window, stats=numbers)
    shuffled = list(servers)
    shuffle.shuffle(shuffled)
    first = status(pool(), one, DONE, PoolStatus(), "2030-01-01T00:00:00Z")

    again = status(pool(), replace(one, servers=tuple(shuffled)), DONE, first, "2031-01-01T00:00:00Z")

    assert again == first, "neither order nor the clock shows"
    assert dump(again) == dump(first)
    assert parse_status({"status": dump(first)}) == first


def test_a_condition_keeps_its_time_until_it_flips() -> None:
    first = judged(seen(server("n1", "new", ready=False)))
    second = status(pool(), seen(server("n1", "new")), DONE, first, "2031-01-01T00:00:00Z")

    assert condition(second, "Ready").last_transition_time == "2031-01-01T00:00:00Z"
    assert condition(second, "ConfigValid").last_transition_time == "2030-01-01T00:00:00Z"
