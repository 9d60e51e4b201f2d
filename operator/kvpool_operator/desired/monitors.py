# SPDX-License-Identifier: Apache-2.0
"""Objects for Prometheus' operator: what to scrape, and when to wake somebody."""

from typing import Any, Final

from kvpool_operator.desired import names
from kvpool_operator.desired.facts import Facts
from kvpool_operator.spec.pool import Pool

__all__ = ["monitors", "pod_monitor", "prometheus_rule"]

_API: Final = "monitoring.coreos.com/v1"


def _sum(expression: str) -> str:
    return f"sum by (namespace, kvpool) ({expression})"


_ALERTS: Final = (
    (
        "KvpoolServerNotReady",
        "kvpool_ready{%s} == 0",
        "10m",
        "A cache server is not ready",
        "The server on {{ $labels.node }} has not been ready for ten minutes; its engines run uncached.",
    ),
    (
        "KvpoolStoresWithoutHits",
        _sum('increase(kvpool_store_chunks_total{%s,disposition="stored"}[1h])')
        + " > 100 and "
        + _sum("increase(kvpool_lookup_tokens_total{%s}[1h])")
        + " > 0 and "
        + _sum("increase(kvpool_hit_tokens_total{%s}[1h])")
        + " == 0",
        "1h",
        "A pool stores and never hits",
        "The pool's condition Hitting says why.",
    ),
    (
        "KvpoolEvictsMoreThanItStores",
        _sum("rate(kvpool_evicted_chunks_total{%s}[30m])")
        + " > "
        + _sum('rate(kvpool_store_chunks_total{%s,disposition="stored"}[30m])')
        + " > 0",
        "1h",
        "A pool evicts more than it stores",
        "The working set does not fit; a larger l1.size would hit more.",
    ),
    (
        "KvpoolChecksumMismatch",
        "increase(kvpool_checksum_mismatches_total{%s}[15m]) > 0",
        "0m",
        "Bytes changed in a cache server's memory",
        "Chunks on {{ $labels.node }} did not match their checksums and were thrown away; check that node's memory.",
    ),
)


def monitors(pool: Pool, facts: Facts) -> list[dict[str, Any]]:
    """Those that the pool wants and whose kinds exist."""
    wanted = pool.spec.monitoring
    made = []
    if wanted.pod_monitor and "PodMonitor" in facts.monitoring_kinds:
        made.append(pod_monitor(pool))
    if wanted.rules_ and "PrometheusRule" in facts.monitoring_kinds:
        made.append(prometheus_rule(pool))
    return made


def pod_monitor(pool: Pool) -> dict[str, Any]:
    """Scrapes every server, ready or not, and puts node and pool on each series."""
    return {
        "apiVersion": _API,
        "kind": "PodMonitor",
        "metadata": _metadata(pool),
        "spec": {
            "selector": {"matchLabels": names.selector_labels(pool)},
            "podMetricsEndpoints": [
                {
                    "port": "operations",
                    "path": "/metrics",
                    "interval": f"{int(pool.spec.monitoring.interval)}s",
                    "relabelings": [
                        {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"},
                        {"targetLabel": "kvpool", "replacement": pool.name},
                    ],
                }
            ],
        },
    }


def prometheus_rule(pool: Pool) -> dict[str, Any]:
    """The alerts of one pool."""
    return {
        "apiVersion": _API,
        "kind": "PrometheusRule",
        "metadata": _metadata(pool),
        "spec": {"groups": [{"name": f"kvpool-{pool.name}", "rules": [_alert(pool, *a) for a in _ALERTS]}]},
    }


def _alert(pool: Pool, name: str, expression: str, lasting: str, summary: str, description: str) -> dict[str, Any]:
    series = f'namespace="{pool.namespace}",kvpool="{pool.name}"'
    return {
        "alert": name,
        "expr": expression.replace("%s", series),
        "for": lasting,
        "labels": {"severity": "warning", "kvpool": pool.name},
        "annotations": {"summary": summary, "description": description},
    }


def _metadata(pool: Pool) -> dict[str, Any]:
    made = names.metadata(pool, names.monitor(pool))
    made["labels"] = {**pool.spec.monitoring.labels, **made["labels"]}
    return made
