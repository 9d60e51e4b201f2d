# SPDX-License-Identifier: Apache-2.0
"""Names, labels and selectors of what a pool owns. They see its identity alone, so no change of the spec moves them."""

import hashlib
from typing import Any, Final

from kvpool_operator.spec.pool import Pool

__all__ = [
    "CONFIG_HASH",
    "L1_PROVISIONED",
    "MANAGER",
    "POOL_LABEL",
    "ROLE_LABEL",
    "SERVER_KEY",
    "TEMPLATE",
    "WIRED",
    "WIRING",
    "audience",
    "claim_template",
    "client_config",
    "daemon_set",
    "host_folder",
    "key_secret",
    "labels",
    "metadata",
    "monitor",
    "network_policy",
    "node_service",
    "selector_labels",
    "server_config",
    "servers_service",
]

MANAGER: Final = "kvpool-operator"
POOL_LABEL: Final = "kvpool.dev/pool"
ROLE_LABEL: Final = "kvpool.dev/role"
CONFIG_HASH: Final = "kvpool.dev/config-hash"
L1_PROVISIONED: Final = "kvpool.dev/l1-provisioned"
"""Annotation of the DaemonSet: bytes of L1 that its pods have memory for; l1.size may change below it live."""
TEMPLATE: Final = "kvpool.dev/template"
"""Annotation of the DaemonSet: digest of its pod template but for that memory."""
SERVER_KEY: Final = "kvpool.dev/server-key"
"""Annotation with the public CURVE key; the Secret itself is never read."""
WIRED: Final = "kvpool.dev/wired"
"""Annotation of pods that admission has wired; its value says to which state of the pool."""
WIRING: Final = "kvpool.dev/wiring"
"""Annotation of pods that opted in: why they are not wired, or what is left to a person."""


def selector_labels(pool: Pool) -> dict[str, str]:
    """Labels of server pods that hold for the life of *pool*. Clients carry the pool's label too: the role tells."""
    return {POOL_LABEL: pool.name, ROLE_LABEL: "server"}


def labels(pool: Pool) -> dict[str, str]:
    """Labels of everything that *pool* owns; pruning finds it by them."""
    return {
        "app.kubernetes.io/name": "kvpool",
        "app.kubernetes.io/component": "server",
        "app.kubernetes.io/instance": pool.name,
        "app.kubernetes.io/managed-by": MANAGER,
        **selector_labels(pool),
    }


def metadata(pool: Pool, name: str) -> dict[str, Any]:
    """Metadata of one owned object: the garbage collector takes it away with the pool."""
    return {
        "name": name,
        "namespace": pool.namespace,
        "labels": labels(pool),
        "ownerReferences": [
            {
                "apiVersion": "kvpool.dev/v1alpha1",
                "kind": "KVCachePool",
                "name": pool.name,
                "uid": pool.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def daemon_set(pool: Pool) -> str:
    """Name of the DaemonSet. Every name of a kind that a pool has several of ends in a suffix, so none can clash."""
    return f"kvpool-{pool.name}"


def node_service(pool: Pool) -> str:
    """Name of the Service that leads to the server of the caller's own node."""
    return f"kvpool-{pool.name}-node"


def servers_service(pool: Pool) -> str:
    """Name of the headless Service that lists all servers."""
    return f"kvpool-{pool.name}-servers"


def server_config(pool: Pool) -> str:
    """Name of the ConfigMap that servers mount."""
    return f"kvpool-{pool.name}-server"


def client_config(pool: Pool) -> str:
    """Name of the ConfigMap with what clients need."""
    return f"kvpool-{pool.name}-client"


def key_secret(pool: Pool, server_key: str) -> str:
    """Name of the Secret with the private half of *server_key*: another key is another Secret, never a change."""
    return f"kvpool-{pool.name}-{hashlib.sha256(server_key.encode()).hexdigest()[:8]}"


def network_policy(pool: Pool) -> str:
    """Name of the NetworkPolicy."""
    return f"kvpool-{pool.name}"


def monitor(pool: Pool) -> str:
    """Name of the PodMonitor and of the PrometheusRule."""
    return f"kvpool-{pool.name}"


def claim_template(pool: Pool) -> str:
    """Name of the ResourceClaimTemplate."""
    return f"kvpool-{pool.name}"


def audience(pool: Pool) -> str:
    """Audience that the tokens of clients must name."""
    return f"kvpool.dev/{pool.namespace}/{pool.name}"


def host_folder(pool: Pool) -> str:
    """Folder of the node that holds the pool's sockets; the same string for everyone who knows the pool's name."""
    return f"/run/kvpool/{pool.namespace}/{pool.name}"
