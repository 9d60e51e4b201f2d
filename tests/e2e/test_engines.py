# SPDX-License-Identifier: Apache-2.0
"""Real engines in pods of a namespace at the Baseline level: what one stored, another of the same node loads."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.engines import Engine, by_hand, claims, engine_pod, prompt
from tests.e2e.kube import Kube
from tests.e2e.pools import Servers, pool

CACHED = 512
"""Whole chunks of a prompt."""


@dataclass
class Story:
    """A pool, two engines on the first node, one on the second."""

    servers: Servers
    first: Engine
    second: Engine
    other: Engine


@pytest.fixture(scope="module")
def story(kube: Kube, engine_python: Path, small_model: Path) -> Iterator[Story]:
    namespace = kube.namespace("baseline")
    kube.apply(*claims(namespace, engine_python, small_model), pool(namespace))
    servers = Servers(kube, namespace)
    servers.wait_ready()
    client = json.loads(kube.get("configmap", "kvpool-main-client", namespace)["data"]["client.json"])
    engines = []
    for name, node in (("first", "node-1"), ("second", "node-1"), ("other", "node-2")):
        pod = engine_pod(namespace, name, node, {})
        engines.append(Engine(kube, by_hand(pod, client, f"kvpool.dev/{namespace}/main")).start())
    yield Story(servers, *(e.wait_ready() for e in engines))
    for engine in engines:
        engine.delete()
    kube.delete("kvp", "main", namespace)


def test_a_second_engine_of_the_node_loads_what_the_first_stored(story: Story) -> None:
    before = story.servers.statistics("node-1")["chunks"]
    tokens, cached = story.first.complete(prompt(1))
    story.servers.wait_chunks("node-1", before + 2)

    assert cached == 0
    assert story.second.complete(prompt(1)) == (tokens, CACHED)


def test_an_engine_of_another_node_uses_its_own_nodes_server(story: Story) -> None:
    tokens, _ = story.first.complete(prompt(2))
    lookups = story.servers.number("node-1", "kvpool_lookups_total")
    before = story.servers.statistics("node-2")["chunks"]

    assert story.other.complete(prompt(2)) == (tokens, 0)
    story.servers.wait_chunks("node-2", before + 2)
    story.other.forget()
    assert story.other.complete(prompt(2)) == (tokens, CACHED)
    assert story.servers.number("node-1", "kvpool_lookups_total") == lookups


def test_bytes_are_streamed_where_no_folder_of_the_node_may_be_mounted(story: Story) -> None:
    story.servers.wait_clients("node-1", 2, "streamed")
    story.servers.wait_clients("node-2", 1, "streamed")
