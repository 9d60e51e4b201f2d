# SPDX-License-Identifier: Apache-2.0
"""What a living server counts is what its catalogue declares."""

import http.client
import os

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.raw_client import RawClient
from tests.fakes.running_server import Running, running_server

from kvpool.config import HttpConfig
from kvpool.metrics.catalogue import all_series, series_key
from kvpool.wire.messages import Lookup, PrepareStore, Stats

CHUNK_TOKENS = 256


@pytest.fixture
def server(tmp_path):
    with running_server(tmp_path, http=HttpConfig(operations_port=0)) as running:
        yield running


@pytest.fixture
def client(server: Running):
    with server.connect() as connected:
        connected.welcome()
        connected.register()
        yield connected


def counters(client: RawClient) -> dict[str, float]:
    statistics, _ = client.ask(Stats())
    return statistics.counters


def scrape(server: Running) -> dict[str, float]:
    connection = http.client.HTTPConnection(server.server.operations_address, timeout=5)
    connection.request("GET", "/metrics")
    families = text_string_to_metric_families(connection.getresponse().read().decode())
    connection.close()
    return {series_key(s.name, **s.labels): s.value for f in families for s in f.samples}


@pytest.mark.behaviour("R009")
def test_a_living_server_has_exactly_the_series_of_the_catalogue(client: RawClient) -> None:
    assert set(counters(client)) == set(all_series())
    assert counters(client)["kvpool_leases"] == 0

    client.ask(PrepareStore(request_id="r", store_id=os.urandom(16)), os.urandom(32))

    assert counters(client)["kvpool_leases"] == 1


def test_a_scrape_has_exactly_the_series_of_the_catalogue(server: Running, client: RawClient) -> None:
    assert set(scrape(server)) == set(all_series())


def test_a_miss_is_counted_with_its_reason_and_its_tokens(client: RawClient) -> None:
    client.ask(Lookup(request_id="r", lookup_id=os.urandom(16)), os.urandom(64))

    after = counters(client)

    assert after[series_key("kvpool_lookups_total", reason="missing")] == 1
    assert after["kvpool_lookup_tokens_total"] == 2 * CHUNK_TOKENS
    assert after["kvpool_hit_tokens_total"] == 0
    assert after[series_key("kvpool_requests_total", request="lookup", result="ok")] == 1
    assert after["kvpool_queue_seconds_count"] >= 1
