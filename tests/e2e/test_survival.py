# SPDX-License-Identifier: Apache-2.0
"""Servers come and go under running engines, in a namespace that lets pods share a socket of the node with them.

The arena lies on the node there, so what was stored is found again by each next server.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.engines import Engine, prompt
from tests.e2e.kube import Kube
from tests.e2e.stories import CACHED, Story, story
from tools import node_images


@pytest.fixture
def kept(kube: Kube, nodes: list[str], engine_python: Path, small_model: Path) -> Iterator[Story]:
    """One engine on each node, sockets and memory on the nodes."""
    spec = {"l1": {"size": "256Mi", "persistence": "Node"}, "ipc": {"mode": "HostPathSocket"}}
    places = [("first", nodes[0]), ("other", nodes[1])]
    with story(kube, "privileged", (engine_python, small_model), places, **spec) as made:
        yield made


def hits_again(kube: Kube, engine: Engine, tokens: list[int], seed: int, after: str) -> None:
    """Wait until the engine has found its server again; until then it computes, with the same tokens."""

    answers = []

    def loaded() -> bool:
        engine.forget()
        answers.append(engine.complete(prompt(seed)))
        return answers[-1][1] == CACHED

    kube.wait(f"hits after {after}", loaded, 60)
    assert all(found == tokens for found, _ in answers)


def test_what_was_stored_outlives_kills_upgrades_and_drains_and_engines_outlive_the_pool(
    kube: Kube, kept: Story, nodes: list[str]
) -> None:
    first, other, servers = kept.engines["first"], kept.engines["other"], kept.servers
    tokens, cached = first.complete(prompt(1))
    assert (other.complete(prompt(1)), cached) == ((tokens, 0), 0)
    for node in nodes:
        servers.wait_chunks(node, 2)
        servers.wait_clients(node, 1, "client-moved")

    kill(kube, kept, nodes[0])
    hits_again(kube, first, tokens, 1, "a kill")

    upgrade(kube, kept)  # engines keep the connector that they started with
    for engine in (first, other):
        hits_again(kube, engine, tokens, 1, "an upgrade")

    drain(kube, kept, nodes[1])
    hits_again(kube, kept.engine("third", nodes[1]).wait_ready(), tokens, 1, "a drain")

    kube.delete("kvp", "main", kept.namespace)
    kube.wait("the end of the servers", lambda: not servers.pods(), 90)
    first.forget()
    assert first.complete(prompt(1)) == (tokens, 0)
    kube.wait("a word from the engine", lambda: first.metric("vllm:kvpool_uncached") >= 1, 30)


def kill(kube: Kube, kept: Story, node: str) -> None:
    """Take the server's pod away without a word to it."""
    before = kept.servers.statistics(node)["boot_id"]
    kube.delete("pod", kept.servers.on(node), kept.namespace, "--grace-period=0", "--force")
    kube.wait("another server", lambda: kept.servers.statistics(node)["boot_id"] != before, 90)
    kept.servers.wait_ready()
    assert kept.servers.statistics(node)["recovered_chunks"] >= 2


def upgrade(kube: Kube, kept: Story) -> None:
    """Give the servers another version, and leave the engines theirs; the operator replaces one after the other."""
    before = {n: p["metadata"]["uid"] for n, p in kept.servers.pods().items()}
    patch = json.dumps({"spec": {"image": node_images.reference("next-server")}})
    kube.kubectl("patch", "kvp", "main", "--namespace", kept.namespace, "--type=merge", f"--patch={patch}")

    def replaced() -> bool:
        now = {n: p["metadata"]["uid"] for n, p in kept.servers.pods().items()}
        return len(now) == len(before) and all(now[n] != before[n] for n in before)

    kube.wait("replaced servers", replaced, 180)
    kept.servers.wait_ready()
    for node in before:
        found = kept.servers.statistics(node)
        assert found["server_version"] == node_images.NEXT_VERSION
        assert found["recovered_chunks"] >= 2
    wanted = {node_images.NEXT_VERSION: len(before)}
    kube.wait("versions", lambda: kube.get("kvp", "main", kept.namespace)["status"]["versions"] == wanted, 60)


def drain(kube: Kube, kept: Story, node: str) -> None:
    """Empty the node of all but its DaemonSets' pods, as before maintenance, and give it back."""
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--grace-period=5", "--timeout=90s")
    kube.kubectl("drain", node, *options, timeout_s=100)
    left = {p["metadata"]["name"] for p in kube.all("pods", kept.namespace) if p["spec"].get("nodeName") == node}
    assert left == {kept.servers.on(node)}
    kube.kubectl("uncordon", node)
    kept.servers.wait_ready()
