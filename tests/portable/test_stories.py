# SPDX-License-Identifier: Apache-2.0
"""A pool's life on any cluster: made, changed, repaired, refused, deleted. Each story has a pool of its own."""

import json
from collections.abc import Iterator

import pytest
from tests.e2e.kube import Object
from tests.portable.providers import Place

KINDS = "daemonsets,services,configmaps,networkpolicies"
CHILDREN = {
    "configmap/kvpool-{}-client",
    "configmap/kvpool-{}-server",
    "daemonset.apps/kvpool-{}",
    "networkpolicy.networking.k8s.io/kvpool-{}",
    "service/kvpool-{}-node",
    "service/kvpool-{}-servers",
}
OPERATIONS = 7411


class Pool:
    """One pool, as a person with kubectl sees it."""

    def __init__(self, place: Place, name: str) -> None:
        self.kube, self.namespace, self.name = place.kube, place.namespace, name

    def body(self) -> Object:
        return self.kube.get("kvp", self.name, self.namespace)

    def wait(self, condition: str, status: str = "True") -> Object:
        """Until the operator says so of the newest spec."""

        def said() -> Object | None:
            body = self.body()
            found = {c["type"]: c for c in body["status"]["conditions"]}[condition]
            fresh = found["observedGeneration"] == body["metadata"]["generation"]
            return body if fresh and found["status"] == status else None

        found: Object = self.kube.wait(f"{self.name}: {condition}={status}", said, 180.0)
        return found

    def children(self) -> set[str]:
        selector = f"kvpool.dev/pool={self.name},kvpool.dev/role=server"
        found = self.kube.kubectl("get", KINDS, "-n", self.namespace, "-l", selector, "-o", "name")
        return set(found.split())

    def patch(self, spec: Object) -> None:
        arguments = ("--type", "merge", "-p", json.dumps({"spec": spec}))
        self.kube.kubectl("patch", "kvp", self.name, "-n", self.namespace, *arguments)

    def configuration(self) -> Object:
        stored = self.kube.get("configmap", f"kvpool-{self.name}-server", self.namespace)
        found: Object = json.loads(stored["data"]["server.json"])
        return found


@pytest.fixture
def pool(place: Place, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A pool that the operator has accepted, named after its story."""
    name = request.node.name.removeprefix("test_").replace("_", "-")[:40].rstrip("-")
    place.kube.apply(place.pool(name))
    made = Pool(place, name)
    made.wait("ConfigValid")
    yield made
    place.kube.kubectl("delete", "kvp", name, "-n", place.namespace, "--ignore-not-found", "--wait=false")


def expected(name: str) -> set[str]:
    return {child.format(name) for child in CHILDREN}


def test_it_gets_all_its_children(pool: Pool) -> None:
    assert pool.children() == expected(pool.name)
    assert "finalizers" not in pool.body()["metadata"]


@pytest.mark.needs("controllers", "pods")
def test_servers_get_ready(place: Place, pool: Pool) -> None:
    body = pool.wait("Ready")

    assert body["status"]["servers"]["summary"] == f"{place.nodes}/{place.nodes}"
    assert f"{place.nodes}/{place.nodes}" in place.kube.kubectl("get", "kvp", pool.name, "-n", place.namespace)


def test_a_change_reaches_it(pool: Pool) -> None:
    pool.patch({"logLevel": "Debug", "network": {"policy": False}})

    pool.kube.wait("the configuration", lambda: pool.configuration()["log"] == {"level": "debug"})
    pool.kube.wait("the policy's end", lambda: not any("networkpolicy" in child for child in pool.children()))


@pytest.mark.needs("controllers", "pods")
def test_a_paced_change_replaces_every_server(place: Place, pool: Pool) -> None:
    pool.patch({"update": {"strategy": "Paced", "settle": "1s", "maxUnavailable": 1}})
    pool.wait("Ready")

    def servers() -> set[str]:
        found = place.kube.all("pods", place.namespace, f"kvpool.dev/pool={pool.name},kvpool.dev/role=server")
        return {p["metadata"]["uid"] for p in found if "deletionTimestamp" not in p["metadata"]}

    before = servers()
    pool.patch({"env": [{"name": "ROUND", "value": "1"}]})
    pool.wait("Ready")

    assert len(servers()) == place.nodes
    assert not servers() & before


def test_deleted_children_come_back(pool: Pool) -> None:
    for child in sorted(pool.children()):
        pool.kube.kubectl("delete", child, "-n", pool.namespace, "--wait=false")

    pool.kube.wait("all children", lambda: pool.children() == expected(pool.name))


def test_a_bad_spec_is_refused_in_words(place: Place) -> None:
    bad = place.pool("bad", l1={"size": "1Mi"})

    with pytest.raises(AssertionError, match="at least 64Mi"):
        place.kube.apply(bad)


@pytest.mark.needs("controllers")
def test_nothing_of_a_deleted_one_stays(pool: Pool) -> None:
    pool.kube.kubectl("delete", "kvp", pool.name, "-n", pool.namespace, "--wait=false")

    pool.kube.wait("the garbage collector", lambda: not pool.children(), 120.0)


@pytest.mark.needs("kubelet")
def test_its_servers_say_how_they_are(place: Place, pool: Pool) -> None:
    pool.wait("Ready")
    found = place.kube.all("pods", place.namespace, f"kvpool.dev/pool={pool.name},kvpool.dev/role=server")

    for pod in found:
        text = place.kube.http_get(place.namespace, pod["metadata"]["name"], OPERATIONS, "/status")
        assert json.loads(text)["l1_bytes"] >= 256 << 20


@pytest.mark.needs("crd")
def test_the_kind_is_found_by_its_short_name_and_its_category(place: Place, pool: Pool) -> None:
    found = place.kube.kubectl("get", "kvcache", "-n", place.namespace, "-o", "name")

    assert f"kvcachepool.kvpool.dev/{pool.name}" in found
