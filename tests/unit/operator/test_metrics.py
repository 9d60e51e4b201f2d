# SPDX-License-Identifier: Apache-2.0
"""The operator's metrics: the catalogue, the exposition, and the HTTP face that serves it."""

import asyncio
import socket
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpool_operator import face
from kvpool_operator.metrics import CATALOGUE, CONTENT_TYPE, PASSES, Metrics
from kvpool_operator.settings import Settings


def series(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {(s.name, tuple(s.labels.values())): s.value for f in families for s in f.samples}


def test_every_series_with_known_labels_exists_from_the_start() -> None:
    found = series(Metrics())

    for metric in CATALOGUE:
        name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
        for value in metric.values or ("",):
            assert found[name, (value,) if value else ()] == 0.0


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_names_say_kind_and_unit_and_no_label_names_an_object(metric: Any) -> None:
    assert metric.name.startswith("kvpool_operator_")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram") == (metric.kind != "gauge" and "seconds" in metric.name)
    assert metric.label not in ("pool", "pod", "node", "namespace", "name")


def test_a_call_counts_as_a_write_if_it_changed_something() -> None:
    metrics = Metrics()
    metrics.called("GET", "pods", 200, 0.1, trial=False)
    metrics.called("PATCH", "services", 200, 0.1, trial=False)
    metrics.called("POST", "secrets", 201, 0.1, trial=True)
    metrics.called("PATCH", "daemonsets", 422, 0.1, trial=False)
    metrics.called("PATCH", "daemonsets", None, 30.0, trial=False)

    found = series(metrics)
    writes = {labels[0]: n for (name, labels), n in found.items() if name == "kvpool_operator_writes_total" and n}
    codes = {labels[0]: n for (name, labels), n in found.items() if name == "kvpool_operator_api_calls_total" and n}
    assert writes == {"services": 1.0}
    assert codes == {"200": 2.0, "201": 1.0, "422": 1.0, "none": 1.0}
    assert found["kvpool_operator_api_call_seconds_count", ("PATCH",)] == 3.0


def test_the_ways_a_pass_may_end_are_those_of_the_catalogue() -> None:
    metrics = Metrics()
    for result in PASSES:
        metrics.count("kvpool_operator_reconciles_total", result)

    assert {series(metrics)["kvpool_operator_reconciles_total", (r,)] for r in PASSES} == {1.0}


def test_the_face_serves_probes_and_metrics_on_its_own_address_alone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    well = True

    async def ask(session: aiohttp.ClientSession, path: str, host: str = "127.0.0.1") -> tuple[int, str, str]:
        async with session.get(f"http://{host}:{port}{path}") as answer:
            return answer.status, answer.headers.get("Content-Type", ""), await answer.text()

    async def main() -> None:
        nonlocal well
        serving = asyncio.create_task(face.serve(Settings(health_port=port), lambda: well, lambda: b"# all\n"))
        async with aiohttp.ClientSession() as session, asyncio.timeout(10):
            while True:
                try:
                    assert (await ask(session, "/healthz"))[0] == 200
                    break
                except aiohttp.ClientError:
                    await asyncio.sleep(0)
            assert await ask(session, "/metrics") == (200, CONTENT_TYPE, "# all\n")
            well = False
            assert (await ask(session, "/readyz"))[::2] == (503, "stuck")
            assert (await ask(session, "/other"))[0] == 404
            with pytest.raises(aiohttp.ClientError):
                await ask(session, "/healthz", host="127.0.0.2")
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(main())
