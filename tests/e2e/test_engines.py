# SPDX-License-Identifier: Apache-2.0
"""Engines with nothing but the label in a namespace at the Baseline level: what one stored, others of its node load."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.engines import prompt
from tests.e2e.kube import Kube
from tests.e2e.stories import CACHED, Story, story

from kvpool.model.whereabouts import rendered

IMAGE_VOLUMES = (1, 36)
"""Version of Kubernetes from which on images can be mounted without a feature gate."""


@pytest.fixture(scope="module")
def shared(kube: Kube, nodes: list[str], engine_python: Path, small_model: Path) -> Iterator[Story]:
    """Two engines on the first node, one on the second."""
    places = [("first", nodes[0]), ("second", nodes[0]), ("other", nodes[1])]
    with story(kube, "baseline", (engine_python, small_model), places) as made:
        yield made


def test_a_second_engine_of_the_node_loads_what_the_first_stored(shared: Story, nodes: list[str]) -> None:
    before = shared.servers.statistics(nodes[0])["chunks"]
    tokens, cached = shared.engines["first"].complete(prompt(1))
    shared.servers.wait_chunks(nodes[0], before + 2)

    assert cached == 0
    assert shared.engines["second"].complete(prompt(1)) == (tokens, CACHED)


def test_an_engine_of_another_node_uses_its_own_nodes_server(shared: Story, nodes: list[str]) -> None:
    tokens, _ = shared.engines["first"].complete(prompt(2))
    lookups = shared.servers.number(nodes[0], "kvpool_lookups_total")
    before = shared.servers.statistics(nodes[1])["chunks"]
    other = shared.engines["other"]

    assert other.complete(prompt(2)) == (tokens, 0)
    shared.servers.wait_chunks(nodes[1], before + 2)
    other.forget()
    assert other.complete(prompt(2)) == (tokens, CACHED)
    assert shared.servers.number(nodes[0], "kvpool_lookups_total") == lookups


def test_bytes_are_streamed_where_no_folder_of_the_node_may_be_mounted(shared: Story, nodes: list[str]) -> None:
    shared.servers.wait_clients(nodes[0], 2, "streamed")
    shared.servers.wait_clients(nodes[1], 1, "streamed")


def test_engines_have_a_list_of_all_servers_that_follows_them(kube: Kube, shared: Story, nodes: list[str]) -> None:
    """For what no name tells them: a scheduler looks there for the servers of other nodes."""
    where = ("first", "--namespace", shared.namespace, "--container", "vllm", "--")

    def told() -> bool:
        listed = kube.kubectl("exec", *where, "cat", "/var/run/secrets/kvpool.dev/servers")
        pods = shared.servers.pods()
        return listed == rendered({n: f"tcp://{pods[n]['status']['podIP']}:7410" for n in nodes})

    kube.wait("the list", told, 120)


def test_the_connector_comes_without_a_copy_where_images_can_be_mounted(
    kube: Kube, shared: Story, nodes: list[str]
) -> None:
    if kube.version() < IMAGE_VOLUMES:
        pytest.skip("this cluster mounts no images")
    mount_payload(kube, shared)
    first, mounted = shared.engines["first"], shared.engine("mounted", nodes[0]).wait_ready()
    pod = kube.get("pod", "mounted", shared.namespace)

    assert [v["name"] for v in pod["spec"]["volumes"] if "image" in v] == ["kvpool-payload"]
    assert "initContainers" not in pod["spec"]
    for seed, storing, loading in ((4, first, mounted), (5, mounted, first)):
        before = shared.servers.statistics(nodes[0])["chunks"]
        tokens, cached = storing.complete(prompt(seed))
        shared.servers.wait_chunks(nodes[0], before + 2)
        assert (cached, loading.complete(prompt(seed))) == (0, (tokens, CACHED))
    shared.engines.pop("mounted").delete()


def mount_payload(kube: Kube, shared: Story) -> None:
    """Pods that come from now on get the connector's image as a volume."""
    patch = json.dumps({"spec": {"clients": {"payload": {"mode": "ImageVolume"}}}})
    kube.kubectl("patch", "kvp", "main", "--namespace", shared.namespace, "--type=merge", f"--patch={patch}")

    def seen() -> bool:
        pool = kube.get("kvp", "main", shared.namespace)
        return bool(pool["status"]["observedGeneration"] == pool["metadata"]["generation"])

    kube.wait("the operator to see it", seen, 60)


def test_the_status_tells_of_clients_and_hits(shared: Story) -> None:
    first = shared.engines["first"]
    first.complete(prompt(3))
    first.forget()
    first.complete(prompt(3))

    shared.servers.wait_counted(3, CACHED)
