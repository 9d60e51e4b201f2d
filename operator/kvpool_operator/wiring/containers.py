# SPDX-License-Identifier: Apache-2.0
"""Which containers of a pod run engines."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvpool_operator.wiring.command import Program, invocation, is_engine_image, mentions_engine
from kvpool_operator.wiring.reasons import Skip

__all__ = ["CONTAINER", "is_leader_worker_set", "is_ray", "targets"]

CONTAINER: Final = "kvpool.dev/container"
"""Annotation that names the engine's container, or several with commas between them."""

_RAY: Final = ("ray.io/cluster", "ray.io/node-type")
_LEADER_WORKER_SET: Final = "leaderworkerset.sigs.k8s.io/name"


def is_ray(labels: Mapping[str, str]) -> bool:
    """True for pods that KubeRay made."""
    return any(label in labels for label in _RAY)


def is_leader_worker_set(labels: Mapping[str, str]) -> bool:
    """True for leaders and workers of a LeaderWorkerSet."""
    return _LEADER_WORKER_SET in labels


def targets(pod: Mapping[str, Any]) -> list[int] | Skip:
    """Indices of the containers that run engines, or why that is not clear."""
    metadata, containers = pod["metadata"], pod["spec"]["containers"]
    if wanted := (metadata.get("annotations") or {}).get(CONTAINER):
        return _named(containers, [name.strip() for name in wanted.split(",")])
    if is_ray(metadata.get("labels") or {}):
        return [0]  # KubeRay's rule: Ray runs in the first one
    for looks_like in (_runs_engine, _starts_engine, is_engine_image):
        if found := [i for i, c in enumerate(containers) if looks_like(c)]:
            return found
    return [0] if len(containers) == 1 else Skip.CONTAINER_UNCLEAR


def _named(containers: Sequence[Mapping[str, Any]], wanted: Sequence[str]) -> list[int] | Skip:
    places = {c["name"]: i for i, c in enumerate(containers)}
    if any(name not in places for name in wanted):
        return Skip.CONTAINER_NOT_FOUND
    return [places[name] for name in dict.fromkeys(wanted)]


def _runs_engine(container: Mapping[str, Any]) -> bool:
    return invocation(container).program is Program.ENGINE


def _starts_engine(container: Mapping[str, Any]) -> bool:
    return invocation(container).program is Program.SHELL and mentions_engine(container)
