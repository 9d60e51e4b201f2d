# SPDX-License-Identifier: Apache-2.0
"""Pods that were created while admission was away: found, told, and made anew where the pool says so."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.conftest import NAMESPACES, Caller, make_namespace, remove_namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import fake_nodes
from tests.cluster.operators import NAMESPACE as OPERATOR_NAMESPACE
from tests.cluster.operators import Operator, operator
from tests.cluster.servers import statistics
from tests.cluster.test_operator import change, make_pool, wait_for_condition
from tests.cluster.webhooks import NAMESPACE, Deployment, deployment

from kvpool_operator.cluster import EVENTS, PODS, POOLS, Kind

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

REPLICA_SETS = Kind("apps/v1", "ReplicaSet", "replicasets")
NODE = "repair-node"


@pytest.fixture
def replica(api: Caller, control_plane: ControlPlane) -> Iterator[Operator]:
    """An operator, and a node for engines and servers."""
    for name in (NAMESPACE, OPERATOR_NAMESPACE):
        api(api.cluster.create(NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}))
    with (
        fake_nodes(api, NODE, **{"test/pool": "yes"}),
        statistics() as numbers,
        operator(control_plane, "repair-operator", numbers.url) as made,
    ):
        yield made


@pytest.fixture
def hooks(api: Caller, control_plane: ControlPlane) -> Iterator[Deployment]:
    """The hooks, and nobody behind them."""
    with deployment(control_plane, api, control_plane.admin) as made:
        yield made


def replica_set(api: Caller, namespace: str, count: int, **annotations: str) -> None:
    labels = {"app": "chat", "kvpool.dev/pool": "a"}
    container = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ["--model", "m"]}
    spec = {
        "replicas": count,
        "selector": {"matchLabels": {"app": "chat"}},
        "template": {"metadata": {"labels": labels, "annotations": annotations}, "spec": {"containers": [container]}},
    }
    body = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "chat"}, "spec": spec}
    assert api(api.cluster.create(REPLICA_SETS, namespace, body))


@pytest.mark.timeout(200)
def test_a_strangers_pods_are_told_so_and_are_not_the_pools_trouble(
    api: Caller, replica: Operator, namespace: str
) -> None:
    """Whether admission saw them or not; and once their namespace is admitted, they count like all others."""
    stranger = make_namespace(api, "baseline")
    make_pool(api, namespace)
    wait_for_condition(api, namespace, "ClientsWired", "Unknown", "NoClients")
    replica_set(api, stranger, 2, **{"kvpool.dev/pool-namespace": namespace})
    owner = api(api.cluster.get(REPLICA_SETS, stranger, "chat"))["metadata"]["uid"]

    async def told() -> list[dict[str, Any]]:
        return await api.cluster.list(EVENTS, stranger, fields=f"regarding.uid={owner},reason=NamespaceNotAllowed")

    async def counted() -> dict[str, Any] | None:
        body: dict[str, Any] = await api.cluster.get(POOLS, namespace, "a")
        return body if body["status"].get("refusedPodCount") == 2 else None

    (event,) = api.wait("the Event at the stranger's", told)
    assert "allowedNamespaces" in event["note"]
    body = api.wait("the count", counted)
    (condition,) = (c for c in body["status"]["conditions"] if c["type"] == "ClientsWired")
    assert (condition["status"], condition["reason"]) == ("Unknown", "NoClients")
    assert f"first {stranger}/chat-" in condition["message"]
    assert not {"unwiredPodCount", "unwiredPods"} & set(body["status"])

    change(api, POOLS, namespace, "a", lambda b: b["spec"].update({"clients": {"allowedNamespaces": [stranger]}}))

    body = wait_for_condition(api, namespace, "ClientsWired", "False", "UnwiredPods")
    assert body["status"]["unwiredPodCount"] == 2
    assert "refusedPodCount" not in body["status"]
    api(remove_namespace(api.cluster, stranger))


def engines(api: Caller, namespace: str) -> list[dict[str, Any]]:
    return api(api.cluster.list(PODS, namespace, "app=chat"))


@pytest.mark.timeout(300)
def test_what_admission_missed_is_told_and_made_anew(
    api: Caller, replica: Operator, hooks: Deployment, namespace: str
) -> None:
    make_pool(api, namespace)
    wait_for_condition(api, namespace, "Ready", "True")
    replica_set(api, namespace, 2)

    body = wait_for_condition(api, namespace, "ClientsWired", "False", "UnwiredPods")
    assert body["status"]["unwiredPodCount"] == 2
    assert {p["reason"] for p in body["status"]["unwiredPods"]} == {"Missed"}
    owner = api(api.cluster.get(REPLICA_SETS, namespace, "chat"))["metadata"]["uid"]

    async def told() -> list[dict[str, Any]]:
        return await api.cluster.list(EVENTS, namespace, fields=f"regarding.uid={owner},reason=Missed")

    (event,) = api.wait("the Event", told)
    assert event["regarding"]["kind"] == "ReplicaSet"
    before = {p["metadata"]["uid"] for p in engines(api, namespace)}

    hooks.add()
    change(api, POOLS, namespace, "a", lambda b: b["spec"].update({"clients": {"rewireUnwired": True}}))

    body = wait_until_wired(api, namespace)
    assert "unwiredPodCount" not in body["status"]
    after = engines(api, namespace)
    assert not before & {p["metadata"]["uid"] for p in after}
    assert all("kvpool.dev/wired" in p["metadata"]["annotations"] for p in after)
    assert len(api(told())) == 1, "said once"


def wait_until_wired(api: Caller, namespace: str) -> dict[str, Any]:
    async def wired() -> dict[str, Any] | None:
        body: dict[str, Any] = await api.cluster.get(POOLS, namespace, "a")
        found = {c["type"]: c for c in body["status"]["conditions"]}["ClientsWired"]
        return body if found["status"] == "True" else None

    found: dict[str, Any] = api.wait("all pods wired", wired, 200.0)
    return found
