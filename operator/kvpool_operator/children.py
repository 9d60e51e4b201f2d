# SPDX-License-Identifier: Apache-2.0
"""Brings what a pool owns to what it should be: applies what differs, deletes what is not wanted any more.

Deciding by what was last applied and by live metadata spares the API server a write for each object at each pass, and
still notices every change that somebody else made.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvpool_operator.cluster import CHILDREN, Cluster, Kind
from kvpool_operator.desired import names
from kvpool_operator.errors import Absent, Rejected
from kvpool_operator.spec import Pool

__all__ = ["Applied", "find", "settle"]

Name = tuple[str, str]
"""Kind and name of an object."""


class Applied:
    """What was last applied, for all pools. One event loop."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Name, tuple[str, str]]] = {}

    def forget(self, uid: str) -> None:
        """The pool is gone."""
        self._known.pop(uid, None)

    def same(self, uid: str, made: Mapping[str, Any], live: Mapping[str, Any] | None) -> bool:
        """True if *made* was applied before and nobody has touched *live* (its metadata) since."""
        known = self._known.get(uid, {}).get(_name(made))
        return live is not None and known == (_digest(made), _version(live))

    def note(self, uid: str, made: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        """*made* was applied and came back as *stored*."""
        self._known.setdefault(uid, {})[_name(made)] = (_digest(made), _version(stored["metadata"]))


async def find(cluster: Cluster, pool: Pool) -> dict[Name, dict[str, Any]]:
    """Metadata of all objects that the pool owns, from the API server itself."""
    selector = f"{names.POOL_LABEL}={pool.name},{names.ROLE_LABEL}=server"

    async def of(kind: Kind) -> list[dict[str, Any]]:
        try:
            return await cluster.list(kind, pool.namespace, selector, metadata_only=True)
        except Absent:
            return []  # a kind that this cluster does not have

    found = await asyncio.gather(*(of(kind) for kind in CHILDREN.values()))
    return {
        (kind.kind, item["metadata"]["name"]): item["metadata"]
        for kind, items in zip(CHILDREN.values(), found, strict=True)
        for item in items
        if any(o["uid"] == pool.uid for o in item["metadata"].get("ownerReferences", []))
    }


async def settle(
    cluster: Cluster,
    pool: Pool,
    wanted: Sequence[Mapping[str, Any]],
    live: Mapping[Name, dict[str, Any]],
    applied: Applied,
) -> int:
    """Apply what of *wanted* differs, in order, then delete what else is *live*; returns the number of writes.

    Raises:
        OperatorError: as the first call that fails; what came before it is done.
    """
    writes = 0
    for made in wanted:
        if not applied.same(pool.uid, made, live.get(_name(made))):
            stored, calls = await _apply(cluster, made, live.get(_name(made)))
            applied.note(pool.uid, made, stored)
            writes += calls
    left_over = live.keys() - {_name(made) for made in wanted}
    for kind, name in sorted(left_over):
        writes += await cluster.delete(CHILDREN[kind], pool.namespace, name, live[kind, name]["uid"])
    return writes


async def _apply(cluster: Cluster, made: Mapping[str, Any], live: Mapping[str, Any] | None) -> tuple[Any, int]:
    """Apply *made*; where somebody has bent the live object so that it cannot be applied, make it anew.

    An edited item of a keyed list (a Service's port) counts as a foreign one beside ours, and the two clash.
    """
    try:
        return await cluster.apply(made), 1
    except Rejected:
        if live is None or not await _good_in_itself(cluster, made):
            raise
    kind = CHILDREN[made["kind"]]
    keeps_pods = made["kind"] == "DaemonSet"
    await cluster.delete(kind, made["metadata"]["namespace"], live["name"], live["uid"], orphan=keeps_pods)
    return await cluster.apply(made), 2


async def _good_in_itself(cluster: Cluster, made: Mapping[str, Any]) -> bool:
    """True if the API server would take *made* under another name."""
    namespace = made["metadata"]["namespace"]
    trial = {**made, "metadata": {**made["metadata"], "name": "kvpool-trial"}}
    try:
        return await cluster.create(CHILDREN[made["kind"]], namespace, trial, dry_run=True)
    except Rejected:
        return False


def _name(made: Mapping[str, Any]) -> Name:
    return made["kind"], made["metadata"]["name"]


def _digest(made: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()


def _version(metadata: Mapping[str, Any]) -> str:
    """Changes when somebody changes more than the status. Labels and annotations do not move a generation."""
    if "generation" not in metadata:
        return str(metadata["resourceVersion"])
    parts = [metadata.get(p) for p in ("uid", "generation", "labels", "ownerReferences")]
    return json.dumps([*parts, _annotations(metadata)], sort_keys=True)


def _annotations(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Without those that some answers of the API server show and others do not."""
    return {k: v for k, v in (metadata.get("annotations") or {}).items() if not k.startswith("deprecated.")}
