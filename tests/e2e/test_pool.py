# SPDX-License-Identifier: Apache-2.0
"""A pool on real nodes: the operator in its pods, servers in theirs, numbers in the status, tools from inside."""

import json
from collections.abc import Iterator

import pytest
from tests.e2e.conftest import SYSTEM
from tests.e2e.kube import Kube
from tests.e2e.pools import OPERATIONS, Servers, pool
from tools import node_images


@pytest.fixture(scope="module")
def servers(kube: Kube) -> Iterator[Servers]:
    """A pool in a namespace at the Baseline level."""
    namespace = kube.namespace("baseline")
    kube.apply(pool(namespace))
    made = Servers(kube, namespace)
    made.wait_ready()
    yield made
    kube.delete("namespace", namespace, "", "--wait=false")


def test_the_operator_runs_from_its_image_where_the_restricted_level_is_enforced(
    kube: Kube, operators: list[str]
) -> None:
    found = kube.get("deployment", "kvpool-operator", SYSTEM)

    assert found["status"]["readyReplicas"] == 2
    assert len(set(operators)) == len(operators), "each on a node of its own"
    pods = kube.all("pods", SYSTEM, "app.kubernetes.io/component=operator")
    assert all(s["restartCount"] == 0 for p in pods for s in p["status"]["containerStatuses"])


def test_each_node_has_a_server_that_read_its_configuration(servers: Servers, nodes: list[str]) -> None:
    assert set(servers.pods()) == set(nodes)
    for node in nodes:
        found = servers.statistics(node)
        assert found["server_id"] == node
        assert found["l1_bytes"] >= 256 << 20


def test_the_status_has_the_servers_numbers(kube: Kube, servers: Servers) -> None:
    def told() -> bool:
        status = kube.get("kvp", "main", servers.namespace)["status"]
        return status.get("capacity") == "512Mi" and status["servers"]["summary"] == "2/2"

    kube.wait("capacity in the status", told)


def test_changed_names_reach_every_server_without_a_new_pod_and_the_status_says_when(
    kube: Kube, servers: Servers
) -> None:
    def followed(status: str) -> bool:
        return kube.condition("kvp", "main", servers.namespace, "SettingsFollowed", status)

    kube.wait("settings in the status", lambda: followed("True"))
    before = {n: p["metadata"]["uid"] for n, p in servers.pods().items()}
    patch = json.dumps({"spec": {"clients": {"allowedNamespaces": ["friends"]}}})
    kube.kubectl("patch", "kvp", "main", "--namespace", servers.namespace, "--type=merge", f"--patch={patch}")

    kube.wait("servers that have not read it yet", lambda: followed("False"), 60)
    kube.wait("all servers", lambda: followed("True"), 240)
    assert {n: p["metadata"]["uid"] for n, p in servers.pods().items()} == before


def test_metrics_are_served(kube: Kube, servers: Servers, nodes: list[str]) -> None:
    text = kube.http_get(servers.namespace, servers.on(nodes[1]), OPERATIONS, "/metrics")

    assert "kvpool_lookups_total" in text


def test_the_command_line_reaches_the_server_of_its_own_node_from_a_pod_with_the_label(
    kube: Kube, servers: Servers, nodes: list[str]
) -> None:
    container = {"name": "look", "image": node_images.reference("server"), "args": ["status", "--json"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "look", "namespace": servers.namespace, "labels": {"kvpool.dev/pool": "main"}},
        "spec": {"nodeName": nodes[1], "restartPolicy": "Never", "containers": [container]},
    }
    kube.apply(pod)
    phase = kube.wait("its end", lambda: ended(kube, servers.namespace, "look"), 60)
    said = kube.kubectl("logs", "look", "--namespace", servers.namespace)

    assert phase == "Succeeded", said
    assert json.loads(said)["statistics"]["server_id"] == nodes[1]


def ended(kube: Kube, namespace: str, name: str) -> str:
    phase = kube.get("pod", name, namespace)["status"]["phase"]
    return phase if phase in ("Succeeded", "Failed") else ""
