# SPDX-License-Identifier: Apache-2.0
"""Simulated nodes that come with what needs them, and go with it."""

import contextlib
from collections.abc import Iterator

from tests.cluster.conftest import Caller

from kvpool_operator.cluster import NODES

__all__ = ["fake_node", "fake_nodes"]


def fake_node(api: Caller, name: str, **labels: str) -> None:
    """Make a node that KWOK plays; whoever makes it on a shared control plane deletes it."""
    body = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "status": {},
    }
    api(api.cluster.create(NODES, "", body))


@contextlib.contextmanager
def fake_nodes(api: Caller, *names: str, **labels: str) -> Iterator[tuple[str, ...]]:
    """Nodes that carry *labels*, deleted at the end however it comes."""
    made: list[str] = []
    try:
        for name in names:
            fake_node(api, name, **labels)
            made.append(name)
        yield names
    finally:
        for name in made:
            api(api.cluster.delete(NODES, "", name, api(api.cluster.get(NODES, "", name))["metadata"]["uid"]))
