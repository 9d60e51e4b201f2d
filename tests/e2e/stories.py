# SPDX-License-Identifier: Apache-2.0
"""What stories with engines share: a namespace with a pool and engines that know nothing of it but a label."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.engines import Engine, claims, engine_pod
from tests.e2e.kube import Kube
from tests.e2e.pools import POOL_LABEL, Servers, pool

__all__ = ["CACHED", "Story", "story"]

CACHED = 512
"""Tokens of the whole chunks of a prompt."""


@dataclass
class Story:
    """A pool and its engines, by name."""

    kube: Kube
    namespace: str
    servers: Servers
    engines: dict[str, Engine]

    def engine(self, name: str, node: str) -> Engine:
        """Start another engine."""
        pod = engine_pod(self.namespace, name, node, {POOL_LABEL: "main"})
        self.engines[name] = Engine(self.kube, pod).start()
        return self.engines[name]


@contextmanager
def story(
    kube: Kube,
    level: str,
    mounted: tuple[Path, Path],
    places: Sequence[tuple[str, str]],
    **spec: Any,
) -> Iterator[Story]:
    """A running story.

    Args:
        kube: the cluster.
        level: pod security that the namespace enforces.
        mounted: the engines' python and their model.
        places: names of engines, and the node of each.
        spec: more of the pool's spec.
    """
    namespace = kube.namespace(level)
    kube.apply(*claims(namespace, *mounted), pool(namespace, clients={"payload": {}}, **spec))
    servers = Servers(kube, namespace)
    servers.wait_ready()
    made = Story(kube, namespace, servers, {})
    try:
        for place in places:
            made.engine(*place)
        for engine in list(made.engines.values()):
            engine.wait_ready()
        yield made
    finally:
        kube.delete("namespace", namespace, "", "--wait=false")
        for name in ("environment", "model"):
            kube.delete("persistentvolume", f"{namespace}-{name}", "", "--wait=false")
