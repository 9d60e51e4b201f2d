# SPDX-License-Identifier: Apache-2.0
from prometheus_client.parser import text_string_to_metric_families

from kvpool.metrics.catalogue import CATALOGUE, all_series, series_key
from kvpool.metrics.exporter import exposition
from kvpool.metrics.numbers import Numbers


def scraped(text: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(text.decode())
    return {series_key(s.name, **s.labels): s.value for family in families for s in family.samples}


def test_every_series_exists_with_0_from_the_start() -> None:
    assert scraped(exposition({})) == dict.fromkeys(all_series(), 0.0)


def test_a_scrape_shows_the_published_values() -> None:
    numbers = Numbers()
    numbers.add('kvpool_lookups_total{reason="all"}', 3)
    numbers.put("kvpool_l1_bytes", 2**40)

    shown = scraped(exposition(numbers.published()))

    assert shown['kvpool_lookups_total{reason="all"}'] == 3
    assert shown["kvpool_l1_bytes"] == 2**40
    assert shown == dict(numbers.published())


def test_each_metric_has_its_help_and_kind() -> None:
    families = {f.name: f for f in text_string_to_metric_families(exposition({}).decode())}

    for metric in CATALOGUE:
        family = families[metric.name.removesuffix("_total")]
        assert family.documentation == metric.help
        assert family.type == metric.kind
