# SPDX-License-Identifier: Apache-2.0
"""The operator's own metrics: one catalogue, which exposition and reference page are made from."""

from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["ADMISSION", "CATALOGUE", "CONTENT_TYPE", "PASSES", "READY", "Metric", "Metrics", "reference"]

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
PASSES: Final = ("ok", "gone", "invalid", "retried", "failed")
"""How a pass over a pool may end."""
READY: Final = ("True", "False", "Unknown")
"""What a pool's condition may say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. Labels take few values; the name of a pool, a pod or a namespace is never one."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    """Name of its label; empty for none."""
    values: tuple[str, ...] = ()
    """Values of the label that exist from the start; others come when they first happen."""
    buckets: tuple[float, ...] = ()


_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_METHODS: Final = ("GET", "PATCH", "POST", "PUT", "DELETE")

CATALOGUE: Final = (
    Metric(
        name="kvpool_operator_reconciles_total",
        kind="counter",
        help="Passes over a pool, by how they ended: invalid: its spec cannot be used; retried: the API server is "
        "busy, or somebody else wrote in between; failed: a right is missing, or an object was refused.",
        label="result",
        values=PASSES,
    ),
    Metric(
        name="kvpool_operator_reconcile_seconds",
        kind="histogram",
        help="Time of one pass over a pool, from its start to its end.",
        buckets=_SECONDS,
    ),
    Metric(name="kvpool_operator_queue_known", kind="gauge", help="Pools that the queue knows."),
    Metric(name="kvpool_operator_queue_due", kind="gauge", help="Pools that are due and wait for a free worker."),
    Metric(
        name="kvpool_operator_queue_oldest_wait_seconds",
        kind="gauge",
        help="How long the pool that waits longest has been due.",
    ),
    Metric(
        name="kvpool_operator_api_calls_total",
        kind="counter",
        help="Answers of the API server to calls of the worker (watches are not in it), by status; none: no answer.",
        label="code",
        values=("200", "201", "403", "404", "409", "422", "429", "500", "503", "none"),
    ),
    Metric(
        name="kvpool_operator_api_call_seconds",
        kind="histogram",
        help="Time of one call of the API server.",
        label="method",
        values=_METHODS,
        buckets=_SECONDS,
    ),
    Metric(
        name="kvpool_operator_writes_total",
        kind="counter",
        help="Changes that the API server accepted, by resource; trial runs are not in it.",
        label="resource",
        values=("kvcachepools", "daemonsets", "configmaps", "services", "pods", "secrets", "leases", "events"),
    ),
    Metric(name="kvpool_operator_leader", kind="gauge", help="1 on the replica that holds the Lease and works."),
    Metric(
        name="kvpool_operator_resync_age_seconds",
        kind="gauge",
        help="Time since all pools were last listed; grows without end on replicas that wait.",
    ),
    Metric(
        name="kvpool_operator_watch_restarts_total",
        kind="counter",
        help="Times that the watches ended by a failure and were started anew.",
    ),
    Metric(
        name="kvpool_operator_pools",
        kind="gauge",
        help="Pools that this replica looks after, by their condition Ready.",
        label="ready",
        values=READY,
    ),
    Metric(
        name="kvpool_operator_unwired_pods",
        kind="gauge",
        help="Pods that opted in to a pool of this replica and are not wired.",
    ),
    Metric(
        name="kvpool_operator_evictions_total",
        kind="counter",
        help="Unwired pods that were evicted so that they are made anew (clients.rewireUnwired).",
    ),
)


ADMISSION: Final = (
    Metric(
        name="kvpool_webhook_reviews_total",
        kind="counter",
        help="Pods that were to be wired: noted: wired, and something is left to a person; skipped: let in as they "
        "are; refused: they asked to be rather refused than left unwired; bad: no review of a pod.",
        label="result",
        values=("wired", "noted", "skipped", "refused", "bad"),
    ),
    Metric(
        name="kvpool_webhook_review_seconds",
        kind="histogram",
        help="Time from a review's first byte to its answer.",
        buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
    ),
    Metric(
        name="kvpool_webhook_ready",
        kind="gauge",
        help="1 if pools are known and the published CA bundle verifies the served certificate.",
    ),
    Metric(
        name="kvpool_webhook_certificate_remaining_seconds",
        kind="gauge",
        help="Time until the served certificate ends; 0 if none is served.",
    ),
)
"""Metrics of the admission server; each replica answers, so sum over them."""


class Metrics:
    """All numbers of one replica. One event loop."""

    def __init__(self, catalogue: tuple[Metric, ...] = CATALOGUE) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in catalogue:
            self._add(metric)

    def count(self, name: str, value: str = "", amount: int = 1) -> None:
        """Add *amount* to a counter; *value* is its label's."""
        counter = self._counters[name]
        (counter.labels(value) if value else counter).inc(amount)

    def put(self, name: str, number: float, value: str = "") -> None:
        """Set a gauge; *value* is its label's."""
        gauge = self._gauges[name]
        (gauge.labels(value) if value else gauge).set(number)

    def time(self, name: str, seconds: float, value: str = "") -> None:
        """Note a duration; *value* is its label's."""
        histogram = self._histograms[name]
        (histogram.labels(value) if value else histogram).observe(seconds)

    def called(self, method: str, resource: str, status: int | None, seconds: float, *, trial: bool) -> None:
        """Note one call of the API server: HTTP method, plural of the kind, status of the answer if one came."""
        self.count("kvpool_operator_api_calls_total", str(status or "none"))
        self.time("kvpool_operator_api_call_seconds", seconds, method)
        if method != "GET" and not trial and status is not None and 200 <= status <= 299:  # noqa: PLR2004 - success
            self.count("kvpool_operator_writes_total", resource)

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _add(self, metric: Metric) -> None:
        labels = [metric.label] if metric.label else []
        match metric.kind:
            case "counter":
                made = self._counters[metric.name] = Counter(metric.name, metric.help, labels, registry=self._registry)
                _start(made, metric.values)
            case "gauge":
                gauge = self._gauges[metric.name] = Gauge(metric.name, metric.help, labels, registry=self._registry)
                _start(gauge, metric.values)
            case "histogram":
                timer = Histogram(metric.name, metric.help, labels, buckets=metric.buckets, registry=self._registry)
                self._histograms[metric.name] = timer
                _start(timer, metric.values)


def _start(made: Counter | Gauge | Histogram, values: tuple[str, ...]) -> None:
    """Let each series that is known beforehand exist with 0."""
    for value in values:
        made.labels(value)


_HEAD: Final = """<!-- Generated by `make generate` from kvpool_operator.metrics. Do not edit. -->

# Metrics of the operator

Each replica serves them at `/metrics` on the port of its probes. Only the replica that holds the Lease works, so sum
over replicas, or take those with `kvpool_operator_leader == 1`. The cache servers' metrics are in
[metrics.md](metrics.md).

| metric | kind | meaning | labels |
|---|---|---|---|
"""


_WEBHOOK: Final = """
## Admission server

Every replica works; sum over them.

| metric | kind | meaning | labels |
|---|---|---|---|
"""


def reference() -> str:
    """Return docs/reference/operator-metrics.md."""
    return _HEAD + "".join(map(_row, CATALOGUE)) + _WEBHOOK + "".join(map(_row, ADMISSION))


def _row(metric: Metric) -> str:
    text = f"`{metric.label}`: {', '.join(metric.values)}" if metric.label else ""
    if metric.buckets:
        text = "; ".join(filter(None, [text, f"buckets: {', '.join(f'{b:g}' for b in metric.buckets)}"]))
    return f"| `{metric.name}` | {metric.kind} | {metric.help} | {text} |\n"
