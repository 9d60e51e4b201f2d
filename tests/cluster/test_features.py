# SPDX-License-Identifier: Apache-2.0
"""What the operator does beyond the plain life of a pool: a failing canary, driver upgrades, GPUs, metrics, rights."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.chart.rendering import real_helm
from tests.cluster.conftest import NAMESPACES, Caller, make_namespace, remove_namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import fake_nodes
from tests.cluster.operators import NAMESPACE, Operator, operator
from tests.cluster.releases import Release
from tests.cluster.servers import Statistics, statistics
from tests.cluster.test_operator import change, make_pool, wait_for_condition

from kvpool.config import decode_server, live_digest
from kvpool_operator.cluster import CHILDREN, NODES, PODS, POOLS
from kvpool_operator.desired.gpu import DRIVER_STATE_LABEL

pytestmark = pytest.mark.cluster

NODE_NAMES = ("feature-a", "feature-b", "feature-c")
HERE = {"nodeSelector": {"test/features": "yes"}}
PACED = {"strategy": "Paced", "settle": "1s", "canary": 1}


@pytest.fixture(scope="module")
def numbers() -> Iterator[Statistics]:
    with statistics() as made:
        yield made


@pytest.fixture(autouse=True)
def usual_answers(numbers: Statistics) -> Iterator[None]:
    """What a test lets servers say is over with it."""
    yield
    numbers.more = {}


@pytest.fixture(scope="module")
def nodes(api: Caller) -> Iterator[tuple[str, ...]]:
    with fake_nodes(api, *NODE_NAMES, **{"test/features": "yes"}) as names:
        yield names


@pytest.fixture(scope="module")
def replica(
    api: Caller, control_plane: ControlPlane, numbers: Statistics, nodes: tuple[str, ...]
) -> Iterator[Operator]:
    api(api.cluster.create(NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))
    with operator(control_plane, "features-operator", numbers.url) as made:
        yield made


async def pods(api: Caller, namespace: str) -> dict[str, dict[str, Any]]:
    """Living server pods by node."""
    found = await api.cluster.list(PODS, namespace, "kvpool.dev/role=server")
    return {p["spec"]["nodeName"]: p for p in found if "deletionTimestamp" not in p["metadata"] and _bound(p)}


def _bound(pod: dict[str, Any]) -> bool:
    return "nodeName" in pod["spec"]


def uids(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {node: p["metadata"]["uid"] for node, p in found.items()}


def set_image(api: Caller, namespace: str, image: str | None) -> None:
    def edit(body: dict[str, Any]) -> None:
        body["spec"].pop("image", None)
        body["spec"] |= {"image": image} if image else {}

    change(api, POOLS, namespace, "a", edit)


def test_a_failing_canary_stops_the_update_and_the_former_spec_brings_it_back(
    api: Caller, replica: Operator, numbers: Statistics, namespace: str
) -> None:
    make_pool(api, namespace, update=PACED, placement=HERE)
    wait_for_condition(api, namespace, "Ready", "True")
    before = uids(api(pods(api, namespace)))
    assert set(before) == set(NODE_NAMES)

    for image in ("crashing:1", "crashing:2"):
        set_image(api, namespace, image)

        async def stopped(image: str = image) -> bool:
            body = await api.cluster.get(POOLS, namespace, "a")
            degraded = {c["type"]: c for c in body["status"]["conditions"]}["Degraded"]
            tried = [p for p in (await pods(api, namespace)).values() if p["spec"]["containers"][0]["image"] == image]
            return len(tried) == 1 and degraded["reason"] == "RolloutStopped"

        api.wait(f"the stop of {image}", stopped, 90.0)
        seen = len(numbers.asked)

        async def looked_again(seen: int = seen) -> bool:
            return len(numbers.asked) >= seen + 3 * len(NODE_NAMES)

        api.wait("further passes", looked_again)
        now = uids(api(pods(api, namespace)))
        kept = [node for node in NODE_NAMES if now.get(node) == before[node]]
        assert len(kept) == 2, "two bad changes in a row hit one and the same node"

    body = wait_for_condition(api, namespace, "Ready", "False")
    (tried_on,) = set(NODE_NAMES) - set(kept)
    assert tried_on in body["status"]["rollout"]["message"]
    assert [(p["node"], p["reason"]) for p in body["status"]["problemNodes"]] == [(tried_on, "CrashLoopBackOff")]

    set_image(api, namespace, None)

    wait_for_condition(api, namespace, "Ready", "True")
    wait_for_condition(api, namespace, "Degraded", "False")
    after = uids(api(pods(api, namespace)))
    assert {node: after[node] for node in kept} == {node: before[node] for node in kept}, "the others never moved"
    assert after[tried_on] != before[tried_on]


def label(api: Caller, node: str, state: str | None) -> None:
    def edit(body: dict[str, Any]) -> None:
        body["metadata"]["labels"].pop(DRIVER_STATE_LABEL, None)
        body["metadata"]["labels"] |= {DRIVER_STATE_LABEL: state} if state else {}

    change(api, NODES, "", node, edit)


def test_a_server_leaves_a_node_while_its_driver_is_replaced_and_comes_back(
    api: Caller, replica: Operator, namespace: str
) -> None:
    make_pool(api, namespace, gpuAccess={"mode": "NRI"}, placement=HERE, update=PACED)
    wait_for_condition(api, namespace, "Ready", "True")
    before = uids(api(pods(api, namespace)))
    away, *others = NODE_NAMES

    label(api, away, "pod-deletion-required")

    async def left() -> bool:
        body = await api.cluster.get(POOLS, namespace, "a")
        return set(await pods(api, namespace)) == set(others) and body["status"]["servers"]["summary"] == "2/2"

    api.wait("the node to be empty", left)
    wait_for_condition(api, namespace, "Ready", "True")

    label(api, away, "upgrade-done")

    async def back() -> bool:
        body = await api.cluster.get(POOLS, namespace, "a")
        return set(await pods(api, namespace)) == set(NODE_NAMES) and body["status"]["servers"]["summary"] == "3/3"

    api.wait("the server's return", back)
    after = uids(api(pods(api, namespace)))
    assert {node: after[node] for node in others} == {node: before[node] for node in others}
    assert after[away] != before[away]
    label(api, away, None)


@pytest.mark.parametrize("mode", ["NRI", "RuntimeClass"])
def test_what_servers_say_of_their_gpus_is_in_the_status(
    api: Caller, replica: Operator, numbers: Statistics, namespace: str, mode: str
) -> None:
    numbers.more = {"gpus": 0, "gpu_reason": "NoGPUVisible"}
    make_pool(api, namespace, gpuAccess={"mode": mode}, placement=HERE)
    if mode == "RuntimeClass":
        wait_for_condition(api, namespace, "GPUAccessReady", "False", "RuntimeClassMissing")
        return
    body = wait_for_condition(api, namespace, "GPUAccessReady", "False", "NoGPUVisible")
    assert body["status"]["gpuMode"] == mode
    assert body["status"]["problemNodeCount"] == len(NODE_NAMES)

    numbers.more = {"gpus": 8, "gpu_reason": ""}

    wait_for_condition(api, namespace, "GPUAccessReady", "True", "GPUsVisible")
    numbers.more = {}


GIB = 1 << 30


def test_another_size_of_l1_replaces_pods_only_if_they_have_no_memory_for_it(
    api: Caller, replica: Operator, numbers: Statistics, namespace: str
) -> None:
    def servers_have(asked_bytes: int, has_bytes: int) -> None:
        numbers.more = {"l1_asked_bytes": asked_bytes, "l1_wanted_bytes": asked_bytes, "l1_bytes": has_bytes}

    def set_l1(**l1: Any) -> None:
        def edit(body: dict[str, Any]) -> None:
            body["spec"]["l1"] |= l1

        change(api, POOLS, namespace, "a", edit)

    servers_have(GIB, GIB)
    make_pool(api, namespace, placement=HERE)
    wait_for_condition(api, namespace, "Ready", "True")
    wait_for_condition(api, namespace, "L1Resized", "True", "AsAsked")
    before = uids(api(pods(api, namespace)))

    set_l1(size="512Mi", highWatermark=90, lowWatermark=80)

    wait_for_condition(api, namespace, "L1Resized", "False", "Resizing")
    assert server_file(api, namespace)["l1"] == {"size_bytes": GIB // 2, "evict_above": 0.9, "evict_to": 0.8}
    servers_have(GIB // 2, GIB // 2)
    wait_for_condition(api, namespace, "L1Resized", "True", "AsAsked")
    wait_for_condition(api, namespace, "Ready", "True")
    assert uids(api(pods(api, namespace))) == before, "nothing was restarted"

    set_l1(size="1Gi")
    servers_have(GIB, GIB)
    wait_for_condition(api, namespace, "L1Resized", "True", "AsAsked")
    assert uids(api(pods(api, namespace))) == before, "there was still room for it"

    set_l1(size="2Gi")
    servers_have(2 * GIB, 2 * GIB)

    async def replaced() -> bool:
        return not set(before.values()) & set(uids(await pods(api, namespace)).values())

    api.wait("new pods", replaced, 90.0)
    wait_for_condition(api, namespace, "Ready", "True")
    numbers.more = {}


FOLLOWED: list[dict[str, Any]] = [
    {"clients": {"allowedNamespaces": ["friends"]}},
    {"tenants": {"default": "guests", "byNamespace": [{"namespace": "friends", "tenant": "shared"}]}},
    {"tenants": {"quotas": [{"tenant": "shared", "l1Percent": 40}]}},
    {"logLevel": "Debug"},
    {"l1": {"size": "1Gi", "highWatermark": 80, "lowWatermark": 60}},
]
"""Changes that running servers take from their file."""


def test_what_servers_follow_reaches_their_file_and_moves_no_pod_and_the_status_says_when(
    api: Caller, replica: Operator, numbers: Statistics, namespace: str
) -> None:
    def servers_follow() -> None:
        """Every server has read the file as it is now."""
        config = decode_server(json.dumps(server_file(api, namespace)).encode(), {})
        numbers.more = {"live_digest": live_digest(config)}
        wait_for_condition(api, namespace, "SettingsFollowed", "True", "ByAllServers")

    make_pool(api, namespace, placement=HERE)
    wait_for_condition(api, namespace, "Ready", "True")
    servers_follow()
    before, files = uids(api(pods(api, namespace))), [server_file(api, namespace)]
    daemon_set = api(api.cluster.get(CHILDREN["DaemonSet"], namespace, "kvpool-a"))
    for part in FOLLOWED:
        change(api, POOLS, namespace, "a", lambda body, part=part: body["spec"].update(part))
        wait_for_condition(api, namespace, "SettingsFollowed", "False", "Spreading")
        wait_for_condition(api, namespace, "Progressing", "False")
        wait_for_condition(api, namespace, "Ready", "True")
        servers_follow()
        files.append(server_file(api, namespace))
        assert uids(api(pods(api, namespace))) == before, part

    assert len({json.dumps(f, sort_keys=True) for f in files}) == len(files), "each of them is in the file"
    assert files[-1]["auth"]["namespaces"] == sorted([namespace, "friends"])
    after = api(api.cluster.get(CHILDREN["DaemonSet"], namespace, "kvpool-a"))
    assert after["metadata"]["generation"] == daemon_set["metadata"]["generation"], "nor was its template touched"


def server_file(api: Caller, namespace: str) -> dict[str, Any]:
    """What the pool's servers are told."""
    found = api(api.cluster.get(CHILDREN["ConfigMap"], namespace, "kvpool-a-server"))
    content: dict[str, Any] = json.loads(found["data"]["server.json"])
    return content


def test_the_operators_metrics_tell_what_it_does(api: Caller, replica: Operator, namespace: str) -> None:
    make_pool(api, namespace, placement=HERE)
    wait_for_condition(api, namespace, "Ready", "True")

    found = replica_metrics(replica)

    assert found["kvpool_operator_leader", ()] == 1.0
    assert found["kvpool_operator_pools", ("True",)] >= 1.0
    assert found["kvpool_operator_reconciles_total", ("ok",)] >= 1.0
    assert found["kvpool_operator_reconcile_seconds_count", ()] >= 1.0
    assert found["kvpool_operator_api_calls_total", ("200",)] >= 10.0
    for resource in ("configmaps", "daemonsets", "services", "secrets", "kvcachepools", "leases"):
        assert found["kvpool_operator_writes_total", (resource,)] >= 1.0, resource


def replica_metrics(replica: Operator) -> dict[tuple[str, tuple[str, ...]], float]:
    connection = http.client.HTTPConnection("127.0.0.1", replica.port, timeout=5)
    connection.request("GET", "/metrics")
    families = text_string_to_metric_families(connection.getresponse().read().decode())
    connection.close()
    return {(s.name, tuple(s.labels.values())): s.value for f in families for s in f.samples}


def test_clients_in_namespaces_that_are_not_watched_cost_a_condition_and_no_refused_call(
    api: Caller, control_plane: ControlPlane, nodes: tuple[str, ...], namespace: str
) -> None:
    other = make_namespace(api, "baseline")
    release = Release(real_helm(), control_plane, make_namespace(api, "restricted"))
    release.install({"crds": {"install": False}, "priorityClass": {"create": False}, "watchNamespaces": [namespace]})
    more = {
        "KUBECONFIG": str(release.account().kubeconfig),
        "KVPOOL_OPERATOR_NAMESPACE": release.namespace,
        "KVPOOL_OPERATOR_WATCH_NAMESPACES": namespace,
    }

    with statistics() as numbers, operator(control_plane, "narrow-operator", numbers.url, **more):
        make_pool(api, namespace, placement=HERE, clients={"allowedNamespaces": [other]})
        wait_for_condition(api, namespace, "Ready", "True")
        body = wait_for_condition(api, namespace, "ClientsWired", "Unknown", "NamespacesNotWatched")

    (condition,) = (c for c in body["status"]["conditions"] if c["type"] == "ClientsWired")
    assert other in condition["message"]
    user = f"system:serviceaccount:{release.namespace}:kvpool-operator"
    mine = [e for e in control_plane.audit() if e["user"]["username"] == user]
    assert mine
    assert not [e["requestURI"] for e in mine if e["annotations"]["authorization.k8s.io/decision"] == "forbid"]
    release.uninstall()
    for name in (other, release.namespace):
        api(remove_namespace(api.cluster, name))
