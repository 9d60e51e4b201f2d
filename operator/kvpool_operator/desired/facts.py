# SPDX-License-Identifier: Apache-2.0
"""What builders must know besides the pool; gathered at the rim, so that builders stay pure."""

from dataclasses import dataclass

__all__ = ["Facts", "Provision"]


@dataclass(frozen=True, slots=True)
class Provision:
    """What the pods of a DaemonSet were made for, as its annotations say."""

    l1_bytes: int
    """Their memory is enough for this much."""

    template: str
    """Digest of everything else in the pod template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The surroundings of one pool."""

    image: str
    """Server image of pools that name none."""
    operator_namespace: str
    server_key: str
    """Public half of the pool's CURVE key (Z85)."""
    issuer: str
    """The `iss` claim of the cluster's service-account tokens."""
    issuer_keys: str
    """JSON Web Key Set of that issuer."""
    servers: str = ""
    """Where the pool's servers are; see ``kvpool.model.whereabouts``."""
    priority_class: str | None = None
    """Priority class of pools that name none."""
    runtime_classes: frozenset[str] = frozenset()
    """Runtime classes that exist."""
    monitoring_kinds: frozenset[str] = frozenset()
    """Kinds of Prometheus' operator that exist: PodMonitor, PrometheusRule."""
    provision: Provision | None = None
    """What the pool's servers were made for; None if there are none yet."""
    node_pools: tuple[str, ...] | None = None
    """Uids of all pools that keep L1 on the node, sorted; what belongs to others is swept there. None if the operator
    does not see all namespaces: then nothing is."""
