# SPDX-License-Identifier: Apache-2.0
"""Who may reach a server: the pool's clients, other servers, Prometheus and the operator."""

from typing import Any

from kvpool_operator.desired import names
from kvpool_operator.desired.config_map import mover_ports, serves_tcp
from kvpool_operator.desired.facts import Facts
from kvpool_operator.desired.services import ports
from kvpool_operator.spec.pool import Pool

__all__ = ["network_policy"]


def network_policy(pool: Pool, facts: Facts) -> dict[str, Any]:
    """The NetworkPolicy of the pool's servers; it restricts what comes in, never what goes out."""
    wanted = ports(pool)
    operations = wanted.pop("operations")
    watchers = sorted({pool.spec.monitoring.namespace, facts.operator_namespace})
    rules = [_rule([_namespace(n) for n in watchers], [operations])]
    if serves_tcp(pool):
        rules.append(_rule([_clients(pool, n) for n in _client_namespaces(pool)], sorted(wanted.values())))
        if movers := mover_ports(pool):
            rules[-1]["ports"].append({"protocol": "TCP", "port": movers[0], "endPort": movers[-1]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": names.metadata(pool, names.network_policy(pool)),
        "spec": {
            "podSelector": {"matchLabels": names.selector_labels(pool)},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


def _client_namespaces(pool: Pool) -> list[str]:
    return sorted({pool.namespace, *pool.spec.clients.allowed_namespaces})


def _clients(pool: Pool, namespace: str) -> dict[str, Any]:
    """Pods of *namespace* with the pool's label; in the pool's own namespace these are its servers, too."""
    return {**_namespace(namespace), "podSelector": {"matchLabels": {names.POOL_LABEL: pool.name}}}


def _namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _rule(peers: list[dict[str, Any]], numbers: list[int]) -> dict[str, Any]:
    return {"from": peers, "ports": [{"protocol": "TCP", "port": n} for n in numbers]}
