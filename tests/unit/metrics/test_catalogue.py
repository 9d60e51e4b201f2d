# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from kvpool.metrics import catalogue
from kvpool.metrics.catalogue import CATALOGUE, Kind, all_series, series, series_key

FORBIDDEN_LABELS = {"client", "request_id", "key", "pod", "pool", "tenant", "model", "namespace"}
BASE_UNITS = {
    "boolean",
    "bytes",
    "chunks",
    "clients",
    "leases",
    "lookups",
    "messages",
    "movers",
    "moves",
    "requests",
    "seconds",
    "slots",
    "tokens",
}


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_metric_follows_the_house_rules(metric: catalogue.Metric) -> None:
    assert re.fullmatch(r"kvpool_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.unit in BASE_UNITS
    assert metric.help.endswith(".")
    assert metric.panel
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_labels_are_closed_and_name_nobody(metric: catalogue.Metric) -> None:
    for name, values in metric.labels:
        assert name not in FORBIDDEN_LABELS
        assert values
        assert len(values) == len(set(values))


def test_names_and_series_are_unique() -> None:
    keys = list(all_series())

    assert len({m.name for m in CATALOGUE}) == len(CATALOGUE)
    assert len(keys) == len(set(keys))


def test_a_seconds_or_bytes_metric_says_so_in_its_name() -> None:
    for metric in CATALOGUE:
        if metric.unit in ("seconds", "bytes"):
            assert metric.unit in metric.name


def test_series_key_is_the_exposition_text() -> None:
    assert series_key("kvpool_lookups_total", reason="all") == 'kvpool_lookups_total{reason="all"}'
    assert series_key("kvpool_chunks") == "kvpool_chunks"


def test_series_of_a_histogram_are_buckets_sum_and_count() -> None:
    keys = list(series(catalogue.find("kvpool_queue_seconds")))

    assert keys[0] == 'kvpool_queue_seconds_bucket{le="0.0001"}'
    assert keys[-3:] == [
        'kvpool_queue_seconds_bucket{le="+Inf"}',
        "kvpool_queue_seconds_sum",
        "kvpool_queue_seconds_count",
    ]


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        catalogue.find("kvpool_no_such_thing")
