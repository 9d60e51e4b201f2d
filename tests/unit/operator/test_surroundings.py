# SPDX-License-Identifier: Apache-2.0
"""What the operator reads of its cluster besides pools: what it may say about it, and what it must not."""

import asyncio
import json
from typing import Any

import pytest

from kvpool_operator.settings import Settings
from kvpool_operator.surroundings import Surroundings


def item(name: str, *, persistence: str = "", **labels: str) -> dict[str, Any]:
    spec = {"l1": {"persistence": persistence}} if persistence else {}
    return {"metadata": {"name": name, "uid": f"uid-{name}", "labels": labels}, "spec": spec}


class Cluster:
    """Answers as `Cluster` does, and keeps what it was asked."""

    def __init__(self, **items: list[dict[str, Any]]) -> None:
        self.items = items
        self.asked: list[tuple[str, str]] = []

    async def list(self, kind: Any, namespace: str = "", labels: str = "", **_: Any) -> list[dict[str, Any]]:
        self.asked.append((kind.plural, namespace))
        found = self.items.get(kind.plural, [])
        return [i for i in found if not labels or labels in i["metadata"]["labels"]]

    async def kinds(self, _group_version: str) -> frozenset[str]:
        return frozenset()

    async def read(self, path: str) -> str:
        return json.dumps({"issuer": "https://issuer"} if "well-known" in path else {"keys": []})


def node_pools(watched: tuple[str, ...]) -> tuple[str, ...] | None:
    cluster: Any = Cluster(
        kvcachepools=[item("b", persistence="Node"), item("a", persistence="Node"), item("c", persistence="Container")]
    )
    surroundings = Surroundings(cluster, Settings(watch_namespaces=watched), lambda: 0.0)
    return asyncio.run(surroundings.facts("key")).node_pools


def test_pools_that_keep_l1_on_nodes_are_known_where_all_namespaces_are_seen() -> None:
    assert node_pools(()) == ("uid-a", "uid-b")


@pytest.mark.parametrize("watched", [("x",), ("x", "y")])
def test_who_sees_some_namespaces_alone_lets_nothing_be_swept(watched: tuple[str, ...]) -> None:
    assert node_pools(watched) is None, "pools of other namespaces may keep theirs on the same nodes"


def test_gpus_of_nodes_are_what_their_labels_promise() -> None:
    label = "nvidia.com/gpu.count"
    nodes = [item("n1", **{label: "8"}), item("n2", **{label: "many"}), item("n3")]
    cluster: Any = Cluster(nodes=nodes)
    surroundings = Surroundings(cluster, Settings(), lambda: 0.0)

    assert asyncio.run(surroundings.node_gpus()) == {"n1": 8}
    asyncio.run(surroundings.node_gpus())
    assert cluster.asked == [("nodes", "")], "kept for a while"
