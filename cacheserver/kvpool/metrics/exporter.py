# SPDX-License-Identifier: Apache-2.0
"""The exposition text of a published snapshot. The only door to prometheus_client."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from kvpool.metrics import catalogue
from kvpool.metrics.catalogue import CATALOGUE, Kind, bucket_text, series_key

__all__ = ["exposition"]


class _Snapshot(Collector):
    """Serves one snapshot; a series without a value shows 0."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values

    def collect(self) -> Iterable[Metric]:
        for metric in CATALOGUE:
            yield self._family(metric)

    def _family(self, metric: catalogue.Metric) -> Metric:
        if metric.kind is Kind.HISTOGRAM:
            return self._histogram(metric)
        cls = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = cls(metric.name, metric.help, labels=_label_names(metric))
        for labels in _label_sets(metric):
            family.add_metric(list(labels.values()), self._value(metric.name, labels))
        return family

    def _histogram(self, metric: catalogue.Metric) -> Metric:
        family = HistogramMetricFamily(metric.name, metric.help, labels=_label_names(metric))
        for labels in _label_sets(metric):
            total = self._value(f"{metric.name}_sum", labels)
            family.add_metric(list(labels.values()), self._buckets(metric, labels), total)
        return family

    def _buckets(self, metric: catalogue.Metric, labels: dict[str, str]) -> list[tuple[str, float]]:
        bounds = [bucket_text(bound) for bound in (*metric.buckets, float("inf"))]
        return [(bound, self._value(f"{metric.name}_bucket", {**labels, "le": bound})) for bound in bounds]

    def _value(self, name: str, labels: dict[str, str]) -> float:
        return self._values.get(series_key(name, **labels), 0.0)


def _label_names(metric: catalogue.Metric) -> list[str]:
    return [name for name, _ in metric.labels]


def _label_sets(metric: catalogue.Metric) -> Iterator[dict[str, str]]:
    for values in product(*(values for _, values in metric.labels)):
        yield dict(zip(_label_names(metric), values, strict=True))


def exposition(values: Mapping[str, float]) -> bytes:
    """Return the text that a scrape gets.

    Args:
        values: number of each series by its key (``Numbers.published``); what is absent shows 0.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(values))
    return generate_latest(registry)
